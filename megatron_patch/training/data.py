"""From the data flags to endless micro-batches and a fixed held-out set."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state
from torch.utils.data import Dataset

from megatron_patch.config import PRETRAIN, SFT, TrainSettings
from megatron_patch.data.batch import PackedBatch
from megatron_patch.data.pretrain_dataset import build_pretrain_datasets
from megatron_patch.data.sampler import MicroBatches, evaluation_micro_batches, load_batches
from megatron_patch.data.sft_dataset import build_sft_datasets, sample_lengths
from megatron_patch.data.tokenizer import load_tokenizer, template_sha256, tokenizer_sha256
from megatron_patch.devices import ranks
from megatron_patch.errors import UserError
from megatron_patch.training.trunk_cache import TrainingRows, training_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INDEX_CACHE = "index_cache"  # below --save
DESCRIBED = 16  # micro-batches that the start-up line is measured on


@dataclass
class RunData:
    """Training micro-batches of this rank, from where the run left off, and the held-out ones.

    `order` is that of the training samples, `parts` their numbers in the data that they are a part of (None: all of them);
    `rows` are for --trunk-cache.
    """

    train: Iterator[PackedBatch]
    heldout: list[PackedBatch]
    order: MicroBatches
    parts: Sequence[int] | None
    tokenizer_sha256: str
    rows: TrainingRows | None = None

    def samples_of(self, consumed_samples: int) -> list[tuple[list[int], list[int]]]:
        """(places among all the run's samples, numbers in the data) of this rank's micro-batches after so many samples."""
        found = []
        for places in self.order.positions(consumed_samples):
            numbers = [self.order.sample(place) for place in places]
            found.append((places, numbers if self.parts is None else [self.parts[number] for number in numbers]))
        return found


def build_data(settings: TrainSettings, kind: str, vocab_size: int, consumed_samples: int) -> RunData:
    """Open, check and sample the data of a run, and print how they are packed. All ranks call it.

    Args:
        settings: of the run.
        kind: "pretrain" (documents cut into rows) or "sft" (one chat a row).
        vocab_size: the model's.
        consumed_samples: taken by earlier steps, over all ranks.

    Raises:
        UserError: the data do not fit the base's tokenizer, the split or the lengths.
    """
    steps, data, cache = settings.steps, settings.data, settings.output.save / INDEX_CACHE
    evaluates = steps.eval_interval > 0
    with ranks.agreement():
        tokenizer = load_tokenizer(settings.model.base_model, trust_remote_code=settings.model.trust_remote_code)
    cut_after = tokenizer.eos_token_id if kind == PRETRAIN and data.isolate_documents else None
    sizes = dict(
        micro_batch_size=steps.micro_batch_size,
        global_batch_size=steps.global_batch_size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
    )
    heldout: list[PackedBatch] = []
    sha256 = tokenizer_sha256(tokenizer)
    train, valid = _datasets(settings, kind, tokenizer, sha256, vocab_size, cache)
    with ranks.agreement():
        order = MicroBatches(
            len(train), **sizes, seed=steps.seed, consumed_samples=consumed_samples, shuffle=kind == SFT
        )
        first = list(load_batches(train, islice(order, DESCRIBED), cut_after=cut_after))
        if evaluates:
            if valid is None:
                raise UserError(
                    f"evaluation needs held-out data: --split {data.split} leaves none; give a share or --eval-interval 0"
                )
            numbers = evaluation_micro_batches(len(valid), eval_iters=steps.eval_iters, **sizes)
            heldout = list(load_batches(valid, numbers, cut_after=cut_after))
        rows = None
        if settings.output.trunk_cache is not None:
            rows = training_rows(settings, kind, train, order, sha256)
    if ranks.is_main():
        print(describe_packing(kind, train, first), flush=True)
    batches = load_batches(train, order, num_workers=data.num_workers, cut_after=cut_after)
    return RunData(batches, heldout, order, getattr(train, "indices", None), sha256, rows)


def _datasets(
    settings: TrainSettings, kind: str, tokenizer: "PreTrainedTokenizerBase", sha256: str, vocab_size: int, cache: Path
) -> tuple[Dataset, Dataset | None]:
    """(training rows, held-out rows or None)."""
    steps, data = settings.steps, settings.data
    common = dict(
        split=data.split,
        seq_length=data.seq_length,
        vocab_size=vocab_size,
        tokenizer_sha256=sha256,
    )
    if kind == SFT:
        with ranks.agreement():
            return build_sft_datasets(
                data_path=_one_folder(data.data_path, "--data-path"),
                valid_data_path=_one_folder(data.valid_data_path, "--valid-data-path") if data.valid_data_path else None,
                template_sha256=template_sha256(tokenizer),
                **common,
            )
    return build_pretrain_datasets(
        data_path=data.data_path,
        valid_data_path=data.valid_data_path,
        train_samples=steps.train_iters * steps.global_batch_size,
        valid_samples=steps.eval_iters * steps.global_batch_size if steps.eval_interval > 0 else 0,
        seed=steps.seed,
        cache_dir=cache,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        repeat_rows=settings.repeats_rows,
        together=ranks.agreement,
        **common,
    )


@contextmanager
def removed_on_error(cache: Path) -> Iterator[None]:
    """A --save directory that was empty is empty again, and can be given once more, after data that are refused."""
    there = cache.exists()
    try:
        yield
    except BaseException:
        if not there and ranks.is_main():
            shutil.rmtree(cache, ignore_errors=True)
        raise


def describe_packing(kind: str, train: Any, first: Sequence[PackedBatch]) -> str:
    """One line: what a sample is, and what the run's first micro-batches hold, padding included.

    Args:
        kind: "pretrain" or "sft".
        train: the training rows.
        first: some micro-batches as the step will see them.
    """
    if kind == SFT:
        lengths = sample_lengths(train)
        rows = f"{len(train):,} samples of {lengths.min():,} to {lengths.max():,} tokens (mean {lengths.mean():,.0f})"
    else:
        rows = f"{len(train):,} rows of {len(train[0].tokens):,} tokens"
    tokens = [len(batch.tokens) for batch in first]
    documents = sum(int(batch.valid[batch.cu_seqlens[:-1].long()].sum()) for batch in first) / len(first)
    padding = 1 - sum(int(batch.valid.sum()) for batch in first) / sum(tokens)
    return (
        f"{kind}: {rows}, laid end to end: {documents:,.1f} documents and {sum(tokens) / len(first):,.0f} tokens a "
        f"micro-batch, {f'{padding:.1%} of them' if padding else 'no'} padding"
    )


def _one_folder(paths: tuple[str, ...], flag: str) -> Path:
    if len(paths) != 1:
        raise UserError(f"SFT's {flag} is one folder that prepare_sft.py wrote: {' '.join(paths)!r}; give one")
    return Path(paths[0])
