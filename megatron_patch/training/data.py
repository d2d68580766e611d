"""From the data flags to endless micro-batches and a fixed held-out set."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.core import parallel_state

from megatron_patch.config import PRETRAIN, SFT, TrainSettings
from megatron_patch.data.batch import PackedBatch
from megatron_patch.data.pretrain_dataset import build_pretrain_datasets
from megatron_patch.data.sampler import MicroBatches, evaluation_micro_batches, load_batches
from megatron_patch.data.sft_dataset import build_sft_datasets
from megatron_patch.data.tokenizer import load_tokenizer, template_sha256, tokenizer_sha256
from megatron_patch.devices import ranks
from megatron_patch.errors import UserError


@dataclass
class RunData:
    """Training micro-batches of this rank, from where the run left off, and the held-out ones."""

    train: Iterator[PackedBatch]
    heldout: list[PackedBatch]


def build_data(settings: TrainSettings, kind: str, vocab_size: int, consumed_samples: int) -> RunData:
    """Open, check and sample the data of a run. All ranks call it.

    Args:
        settings: of the run.
        kind: "pretrain" (documents cut into rows) or "sft" (one chat a row).
        vocab_size: the model's.
        consumed_samples: taken by earlier steps, over all ranks.

    Raises:
        UserError: the data do not fit the base's tokenizer, the split or the lengths.
    """
    steps, data = settings.steps, settings.data
    evaluates = steps.eval_interval > 0
    with ranks.agreement():
        tokenizer = load_tokenizer(settings.model.base_model, trust_remote_code=settings.model.trust_remote_code)
    cut_after = None
    if kind == PRETRAIN:
        cut_after = tokenizer.eos_token_id if data.isolate_documents else None
        train, valid = build_pretrain_datasets(
            data_path=data.data_path,
            valid_data_path=data.valid_data_path,
            split=data.split,
            seq_length=data.seq_length,
            train_samples=steps.train_iters * steps.global_batch_size,
            valid_samples=steps.eval_iters * steps.global_batch_size if evaluates else 0,
            seed=steps.seed,
            cache_dir=settings.output.save / "index_cache",
            eos_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            vocab_size=vocab_size,
            tokenizer_sha256=tokenizer_sha256(tokenizer),
            together=ranks.agreement,
        )
    else:
        with ranks.agreement():
            train, valid = build_sft_datasets(
                data_path=_one_folder(data.data_path, "--data-path"),
                valid_data_path=_one_folder(data.valid_data_path, "--valid-data-path") if data.valid_data_path else None,
                split=data.split,
                seq_length=data.seq_length,
                tokenizer_sha256=tokenizer_sha256(tokenizer),
                template_sha256=template_sha256(tokenizer),
            )
    sizes = dict(
        micro_batch_size=steps.micro_batch_size,
        global_batch_size=steps.global_batch_size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
    )
    heldout: list[PackedBatch] = []
    with ranks.agreement():
        order = MicroBatches(
            len(train), **sizes, seed=steps.seed, consumed_samples=consumed_samples, shuffle=kind == SFT
        )
        if evaluates:
            if valid is None:
                raise UserError(
                    f"evaluation needs held-out data: --split {data.split} leaves none; give a share or --eval-interval 0"
                )
            numbers = evaluation_micro_batches(len(valid), eval_iters=steps.eval_iters, **sizes)
            heldout = list(load_batches(valid, numbers, cut_after=cut_after))
    return RunData(load_batches(train, order, num_workers=data.num_workers, cut_after=cut_after), heldout)


def _one_folder(paths: tuple[str, ...], flag: str) -> Path:
    if len(paths) != 1:
        raise UserError(f"SFT's {flag} is one folder that prepare_sft.py wrote: {' '.join(paths)!r}; give one")
    return Path(paths[0])
