"""The samples that prepare_sft wrote, as training rows: one document each."""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from megatron_patch.data.batch import Row
from megatron_patch.data.sft_corpus import META, SAMPLES, SCHEMA
from megatron_patch.data.split import parse_split
from megatron_patch.errors import UserError
from megatron_patch.io.strict_json import read_json

_META_KEYS = {
    "samples": int, "tokens": int, "longest": int, "vocab_size": int,
    "tokenizer": str, "tokenizer_sha256": str, "template_sha256": str,
}  # fmt: skip
SPLIT_SEED = 20260101  # fixed, so that another training seed does not move held-out samples into training


class SftDataset(Dataset):
    """Rows of `DIR/samples.parquet`; held as flat arrays, 5 bytes a token.

    Args:
        directory: what prepare_sft wrote.
        seq_length: the run's; no sample may be longer.
        vocab_size: the model's; None skips the comparison with the samples' ids.
        tokenizer_sha256, template_sha256: the run's, compared with what the samples were made with; None skips that.

    Raises:
        UserError: no such directory, damaged files, or samples made for another tokenizer, template or length.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        seq_length: int,
        vocab_size: int | None = None,
        tokenizer_sha256: str | None = None,
        template_sha256: str | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.meta = read_meta(self.directory)
        for what, expected in (("tokenizer", tokenizer_sha256), ("template", template_sha256)):
            if expected is not None and self.meta[f"{what}_sha256"] != expected:
                raise UserError(
                    f"SFT samples must be made with the run's {what}: {str(directory)!r} has hash "
                    f"{self.meta[f'{what}_sha256'][:12]}, the run {expected[:12]}; run prepare_sft.py again with "
                    "--tokenizer of the base model"
                )
        if vocab_size is not None and self.meta["vocab_size"] > vocab_size:
            raise UserError(
                f"SFT samples must fit the model's vocabulary: {str(directory)!r} has {self.meta['vocab_size']} ids, the "
                f"model {vocab_size}; the base's tokenizer and config.json are of different models, get it again"
            )
        if self.meta["longest"] > seq_length:
            raise UserError(
                f"samples must fit --seq-length: {str(directory)!r} has one of {self.meta['longest']} tokens, "
                f"--seq-length is {seq_length}; raise it or run prepare_sft.py again with --seq-length {seq_length}"
            )
        self._ids, self._mask, self._starts = _read_samples(self.directory / SAMPLES)
        if len(self) != self.meta["samples"] or len(self._ids) != self.meta["tokens"]:
            raise UserError(
                f"{META} and {SAMPLES} in {str(directory)!r} disagree: {self.meta['samples']} samples of "
                f"{self.meta['tokens']} tokens against {len(self)} of {len(self._ids)}; run prepare_sft.py again"
            )
        self._check_samples()

    def _check_samples(self) -> None:
        lengths, ids, limit = self.lengths, self._ids, self.meta["vocab_size"]
        for holds, rule in (
            (lengths.min() >= 2 and lengths.max() == self.meta["longest"], "samples have 2 to `longest` tokens"),
            (ids.min() >= 0 and ids.max() < limit, f"ids lie from 0 to below vocab_size {limit}"),
            (np.isin(self._mask, (0, 1)).all(), "a loss mask is of 0 and 1"),
            (np.add.reduceat(self._mask, self._starts[:-1], dtype=np.int64).min() > 0, "every sample has a learned token"),
        ):
            if not holds:
                raise UserError(f"{rule}: not so in {str(self.directory / SAMPLES)!r}; run prepare_sft.py again")

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [samples]."""
        return np.diff(self._starts)

    def sample(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32 [n]) and loss mask (int8 [n]; 1: this token is a target) as stored."""
        inside = slice(self._starts[number], self._starts[number + 1])
        return self._ids[inside], self._mask[inside]

    def __getitem__(self, number: int) -> Row:
        """The sample as inputs and shifted labels, n - 1 tokens: its last token is a target only."""
        ids, mask = self.sample(number)
        ids = torch.from_numpy(ids.astype(np.int64))
        return Row(ids[:-1], ids[1:], torch.from_numpy(mask[1:].astype(np.float32)), number)

    @property
    def row_starts(self) -> np.ndarray:
        """int64 [samples + 1]: the first token of each row where all lie end to end, and the end."""
        return np.concatenate([[0], np.cumsum(self.lengths - 1)])

    def content_sha256(self) -> str:
        """Of all tokens and lengths."""
        digest = hashlib.sha256(np.ascontiguousarray(self._ids).data)
        digest.update(self._starts.data)
        return digest.hexdigest()


def read_meta(directory: Path) -> dict[str, Any]:
    """`meta.json` of a prepared SFT folder.

    Raises:
        UserError: it is missing, damaged or of another schema.
    """
    try:
        meta = read_json(directory / META)
        if meta["schema"] != SCHEMA:
            raise UserError(
                f"{directory / META} has schema {meta['schema']}, this version reads {SCHEMA}; run prepare_sft.py again"
            )
        for key, kind in _META_KEYS.items():
            if type(meta[key]) is not kind:
                raise ValueError(f"{key} is {meta[key]!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"SFT's --data-path is a folder that prepare_sft.py wrote: {str(directory)!r} has no readable {META} "
            f"({type(error).__name__}: {error}); run it first"
        ) from None
    return meta


def build_sft_datasets(
    *,
    data_path: str | Path,
    valid_data_path: str | Path | None,
    split: str,
    seq_length: int,
    vocab_size: int | None = None,
    tokenizer_sha256: str | None = None,
    template_sha256: str | None = None,
) -> tuple[Dataset, Dataset | None]:
    """Training and validation samples.

    Args:
        valid_data_path: a folder for validation; then `split` is not used and `data_path` is all for training.
        split: shares like "90,10" (training, validation): the same samples each time, for every training seed.

    Returns:
        (training, validation); validation is None when its share is 0.

    Raises:
        UserError: as `SftDataset`, or a split that leaves a wanted part empty.
    """
    checks = {
        "seq_length": seq_length, "vocab_size": vocab_size,
        "tokenizer_sha256": tokenizer_sha256, "template_sha256": template_sha256,
    }  # fmt: skip
    train = SftDataset(data_path, **checks)
    if valid_data_path is not None:
        return train, SftDataset(valid_data_path, **checks)
    shares = parse_split(split)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(train))
    edges = [round(edge * len(train)) for edge in np.cumsum([0.0, *shares])]
    parts: Sequence[np.ndarray] = [np.sort(order[a:b]) for a, b in itertools.pairwise(edges)]
    for part, share, name in zip(parts, shares, ("training", "validation"), strict=False):
        if share > 0 and not len(part):
            raise UserError(
                f"--split {split} leaves no {name} sample of {len(train)}; give a larger share, or --valid-data-path"
            )
    train_part, valid_part = (Subset(train, part.tolist()) for part in parts[:2])
    return train_part, valid_part if len(valid_part) else None


def sample_lengths(dataset: Dataset) -> np.ndarray:
    """Tokens of each sample of what `build_sft_datasets` returned, int64 [samples]."""
    return dataset.dataset.lengths[dataset.indices] if isinstance(dataset, Subset) else dataset.lengths


def _read_samples(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids int32 [tokens], mask int8 [tokens], starts int64 [samples + 1])."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    ids, masks, lengths = [], [], []
    try:
        with ParquetFile(path) as file:
            columns = {field.name: getattr(field.type, "value_type", None) for field in file.schema_arrow}
            if columns != {"input_ids": pyarrow.int32(), "loss_mask": pyarrow.int8()}:
                found = ", ".join(f"{field.name}: {field.type}" for field in file.schema_arrow)
                raise UserError(f"{str(path)!r} has the columns {found}, not those of prepare_sft.py; run it again")
            for group in range(file.num_row_groups):
                for batch in file.read_row_group(group).to_batches():
                    id_lists, mask_lists = batch.column(0), batch.column(1)
                    if id_lists.null_count or mask_lists.null_count:
                        raise UserError(f"{str(path)!r} has rows without a value; run prepare_sft.py again")
                    if not id_lists.value_lengths().equals(mask_lists.value_lengths()):
                        raise UserError(f"{path}: a loss mask is not as long as its tokens; run prepare_sft.py again")
                    ids.append(id_lists.flatten().to_numpy())
                    masks.append(mask_lists.flatten().to_numpy())
                    lengths.append(id_lists.value_lengths().to_numpy())
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {str(path)!r}: {error}; run prepare_sft.py again") from error
    if not ids:
        raise UserError(f"{str(path)!r} holds no sample; run prepare_sft.py again")
    starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    return np.concatenate(ids), np.concatenate(masks), starts
