"""megatron-core's GPTDataset over prepared text, checked before it is trusted."""

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from megatron_patch.data.batch import UNNUMBERED, Row
from megatron_patch.data.repeated_rows import CUT_SEED, RepeatedRows
from megatron_patch.data.split import parse_split
from megatron_patch.data.token_files import check_files, read_report
from megatron_patch.errors import UserError


class Blend(NamedTuple):
    """Prefixes and their weights; one prefix alone has none."""

    prefixes: list[str]
    weights: list[float] | None


class PretrainDataset(Dataset):
    """Rows of `seq_length` tokens, documents running on from row to row as megatron-core cuts them.

    P.bin is not read as a whole at the start, so that each row's ids are compared with the vocabulary when it is taken: an
    embedding looked up beyond its end is a crash on a CPU, and on some devices a silent zero.

    Attributes:
        numbers: int64 [len], each row's own number, the same in every epoch; None where no row comes twice.
        sha256: of what the rows are cut from.
    """

    def __init__(self, dataset: Any, vocab_size: int, sha256: str = "") -> None:
        self.dataset, self.vocab_size, self.sha256 = dataset, vocab_size, sha256
        self.numbers = dataset.numbers if isinstance(dataset, RepeatedRows) else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Row:
        item = self.dataset[number]
        first, last = map(int, item["tokens"].aminmax())
        if first < 0 or max(last, int(item["labels"].max())) >= self.vocab_size:
            raise UserError(
                f"ids lie from 0 to below the model's {self.vocab_size}: row {number} of the pretraining data has {first} to "
                f"{last}; P.bin is damaged, run prepare_pretrain.py again"
            )
        own = UNNUMBERED if self.numbers is None else int(self.numbers[number])
        return Row(item["tokens"], item["labels"], item["loss_mask"], own)


def parse_blend(data_path: Sequence[str], flag: str = "--data-path") -> Blend:
    """`P`, or `0.3 P1 0.7 P2`.

    Raises:
        UserError: neither, or a weight that is not positive.
    """
    if len(data_path) == 1:
        return Blend([data_path[0]], None)
    try:
        weights = [float(weight) for weight in data_path[::2]]
    except ValueError:
        weights = []
    prefixes = list(data_path[1::2])
    if not weights or len(weights) != len(prefixes) or any(not 0 < w < math.inf for w in weights):
        raise UserError(
            f"{flag} is one prefix, or a weight > 0 before each prefix, e.g. 0.3 P1 0.7 P2: got "
            f"{' '.join(data_path)!r}; mend it"
        )
    if len(set(prefixes)) != len(prefixes):
        raise UserError(f"{flag} names a prefix twice: {' '.join(data_path)!r}; add its weights up")
    return Blend(prefixes, None if len(prefixes) == 1 else weights)


def build_pretrain_datasets(
    *,
    data_path: Sequence[str],
    valid_data_path: Sequence[str] | None,
    split: str,
    seq_length: int,
    train_samples: int,
    valid_samples: int,
    seed: int,
    cache_dir: str | Path,
    eos_id: int,
    pad_id: int,
    vocab_size: int,
    tokenizer_sha256: str | None = None,
    repeat_rows: bool = False,
    together: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[PretrainDataset, PretrainDataset | None]:
    """Training and validation rows; call on all ranks. A blend needs a process group (as megatron-core does).

    Args:
        data_path: a prefix, or weights and prefixes.
        valid_data_path: validation prefixes; then `split` is not used.
        split: shares of each prefix's documents, e.g. "99,1".
        seq_length: tokens per row.
        train_samples: rows the whole run takes; epochs repeat as needed. Their order depends on this number.
        valid_samples: validation rows; 0 builds none.
        cache_dir: where megatron-core keeps its indices; seen by all ranks.
        eos_id, pad_id, vocab_size: of the model; `pad_id` may equal `eos_id`, as in DeepSeek-V2's tokenizer.
        tokenizer_sha256: the run's tokenizer, compared with the one that made the data.
        repeat_rows: the training rows are the same in every epoch (`repeated_rows`), instead of cut anew.
        together: what the checks run in. Ranks agree there, because in megatron-core's builder they wait for rank 0,
            which makes the indices.

    Raises:
        UserError: missing, damaged or foreign files, or a split that leaves a wanted part empty.
    """
    with together():
        train_blend = parse_blend(data_path)
        valid_blend = parse_blend(valid_data_path, "--valid-data-path") if valid_data_path else None
        fingerprint, documents = hashlib.sha256(), {}
        for prefix in [*train_blend.prefixes, *(valid_blend.prefixes if valid_blend else [])]:
            report = read_report(prefix)
            _check_report(report, prefix, eos_id, vocab_size, tokenizer_sha256)
            documents[prefix] = check_files(prefix, report)
            fingerprint.update(Path(f"{prefix}.idx").read_bytes())
            if prefix == train_blend.prefixes[-1]:
                cut_from = fingerprint.hexdigest()  # of the training prefixes alone, which come first
        if valid_blend is None:
            _check_split(split, {prefix: documents[prefix] for prefix in train_blend.prefixes}, valid_samples)

    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    def build(blend: Blend, order_seed: int, training_rows: int | None) -> tuple[Any, Any]:
        """(training rows, None: those of one epoch; validation rows)."""
        if valid_blend is None:
            sources: dict[str, Any] = {"blend": tuple(blend), "split": ",".join(map(str, parse_split(split)))}
        else:
            sources = {"blend_per_split": [tuple(blend), tuple(valid_blend) if valid_samples else None, None]}
        config = GPTDatasetConfig(
            random_seed=order_seed,
            sequence_length=seq_length,
            path_to_cache=str(cache_dir),
            tokenizer=_TokenIds(eos_id, pad_id, vocab_size, fingerprint.hexdigest()),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,  # batch.collate does it, where it also cuts documents
            create_attention_mask=False,
            **sources,
        )
        # A part that exists is built with one row at least: megatron-core cannot be told to leave it out.
        sizes = [training_rows, max(valid_samples, 1), 1]
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[:2]

    train, valid = build(train_blend, seed, 1 if repeat_rows else train_samples)
    if repeat_rows:
        parts = [build(Blend([prefix], None), CUT_SEED, None)[0] for prefix in train_blend.prefixes]
        with together():
            train = RepeatedRows(parts, train_blend.prefixes, train_blend.weights, train_samples, seed)
    return PretrainDataset(train, vocab_size, cut_from), PretrainDataset(valid, vocab_size) if valid_samples else None


class _TokenIds:
    """What GPTDataset asks a tokenizer. Its `pad` is an id no text has: with DeepSeek-V2's pad = EOS, GPTDataset would
    take every EOS for padding. `unique_identifiers` go into the names of its cached indices, hence the data's hash:
    without it, data prepared again under the same prefix would be read through the old indices."""

    pad = -1

    def __init__(self, eos_id: int, pad_id: int, vocab_size: int, data_sha256: str) -> None:
        self.eod = self.eos = eos_id
        self.vocab_size = vocab_size
        self.unique_identifiers = {"eod": eos_id, "pad": pad_id, "vocab_size": vocab_size, "data": data_sha256}


def _check_report(report: dict[str, Any], prefix: str, eos_id: int, vocab_size: int, sha256: str | None) -> None:
    if sha256 is not None and report["tokenizer_sha256"] != sha256:
        raise UserError(
            f"pretraining data must be made with the run's tokenizer: {prefix} has hash "
            f"{report['tokenizer_sha256'][:12]}, the run {sha256[:12]}; run prepare_pretrain.py again with --tokenizer "
            "of the base model"
        )
    if report["eos_id"] != eos_id or report["vocab_size"] > vocab_size:
        raise UserError(
            f"pretraining data must fit the model's vocabulary: {prefix} has EOS {report['eos_id']} and "
            f"{report['vocab_size']} ids, the model EOS {eos_id} and {vocab_size} ids; run prepare_pretrain.py again "
            "with --tokenizer of the base model"
        )


def _check_split(split: str, documents: dict[str, int], valid_samples: int) -> None:
    """An empty part would make megatron-core count epochs of nothing forever."""
    train, valid, neither = parse_split(split)
    if valid_samples and not valid:
        raise UserError(
            f"--split {split} has no share for validation; give one, or --valid-data-path, or --eval-iters 0"
        )
    for prefix, number in documents.items():
        edges = [round(edge * number) for edge in (0.0, train, train + valid, train + valid + neither)]
        for name, share, first, last in zip(
            ("training", "validation", "third"), (train, valid, neither), edges, edges[1:]
        ):
            if share and first == last:
                raise UserError(
                    f"--split {split} leaves no {name} document of the {number} in {prefix}; give a larger share, or "
                    "--valid-data-path"
                )
