"""What one side did with a pack of tokens, module by module; kept in a directory that another machine can compare.

    DUMP/dump.json             who, how, and the digests of its weights
    DUMP/records.safetensors   tokens, boundaries and everything recorded, under `layers.N.MODULE`

Recorded of each layer (T tokens, D hidden, X experts, S slots): `input`, `norm`, `attention`, `post_norm`, `experts`,
`shared` or `mlp`, `output` [T, D] in the side's dtype; `router` fp32 [T, X], the routing weights, 0 for experts that were
not chosen; of DSA layers `indexer` fp32 [T, T], the index scores (where asked for), and `indices` int32 [T, S], the
selected positions in the pack, ascending, -1 at the tail. Of the whole: `log_probs` fp32 [T] of the next token, 0 where
`predicts` (bool [T]) is False: a document's last token predicts nothing.
"""

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_patch.errors import UserError
from megatron_patch.io.publish import atomic_directory, atomic_write_json
from megatron_patch.io.strict_json import read_json

SCHEMA = 1
META, RECORDS = "dump.json", "records.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Dump:
    """One side.

    Attributes:
        side: "trainer", "checkpoint" or "rollout".
        source: the directory or file that it is of.
        dtype: "float32" or "bfloat16"; "unknown" of a rollout, which does not say.
        topk: keys that a query of a DSA layer attends to; None: no DSA layer.
        environment: device and versions.
        tensors: as the module says; a rollout has `tokens`, `cu_seqlens`, `log_probs`, `predicts`, perhaps `router`s.
        weights: Hugging Face name -> SHA-256 of shape and values in fp32.
        trained: the trainer's: those of them that train.
        self_test: the trainer's: gradients recorded against not recorded.
    """

    side: str
    source: str
    dtype: str
    topk: int | None
    environment: dict[str, str]
    tensors: dict[str, Tensor]
    weights: dict[str, str] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    self_test: dict[str, float | bool] | None = None

    @property
    def tokens(self) -> Tensor:
        return self.tensors["tokens"]

    @property
    def cu_seqlens(self) -> Tensor:
        return self.tensors["cu_seqlens"]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def layer(self, number: int) -> dict[str, Tensor]:
        """The records of a layer, by module."""
        prefix = f"layers.{number}."
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers with any record."""
        return sorted({int(name.split(".")[1]) for name in self.tensors if name.startswith("layers.")})

    def save(self, output: Path) -> None:
        """Write the directory, all or nothing."""
        with atomic_directory(output) as folder:
            tensors = {name: t.detach().cpu().contiguous() for name, t in self.tensors.items()}
            save_file(tensors, folder / RECORDS)
            meta = {name: value for name, value in asdict(self).items() if name != "tensors"}
            atomic_write_json(folder / META, {"schema": SCHEMA, **meta})


def load_dump(directory: Path) -> Dump:
    """A dump that `Dump.save` wrote.

    Raises:
        UserError: it is none, or damaged.
    """
    try:
        meta = dict(read_json(directory / META))
        if meta.pop("schema") != SCHEMA:
            raise ValueError("it is of another release's schema")
        with safe_open(directory / RECORDS, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Dump(**meta, tensors=_whole(tensors))
    except FileNotFoundError:
        raise UserError(
            f"a dump is a directory of `dsa-upcycle parity dump`: {directory} has no {META} and {RECORDS}; write it first"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"a dump must be whole: {directory}: {error}; write it again") from None


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, if those that every side has are there and fit."""
    number = len(tensors["tokens"])
    boundaries = tensors["cu_seqlens"]
    if boundaries[0] != 0 or boundaries[-1] != number or (boundaries.diff() < 1).any():
        raise ValueError(f"document boundaries {boundaries.tolist()[:5]} do not cover {number} tokens")
    for name in ("log_probs", "predicts"):
        if tensors[name].shape != (number,):
            raise ValueError(f"{name} is {tuple(tensors[name].shape)} for {number} tokens")
    return dict(tensors)


def indices_of(selected_TT: Tensor) -> Tensor:
    """bool [T, T] -> int32 [T, S]: ascending positions, -1 at the tail; S is the largest number of a row."""
    count = selected_TT.sum(-1)
    slots = int(count.max())
    order = torch.where(selected_TT, torch.arange(selected_TT.size(1)), selected_TT.size(1)).sort(-1).values[:, :slots]
    return torch.where(torch.arange(slots) < count[:, None], order, -1).int()


def selected_of(indices_TS: Tensor) -> Tensor:
    """int [T, S] -> bool [T, T], the inverse; `-1` is no position."""
    number = len(indices_TS)
    columns = torch.where(indices_TS < 0, number, indices_TS).long()
    return torch.zeros(number, number + 1, dtype=torch.bool).scatter(1, columns, True)[:, :number]


def next_tokens(tokens: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(int64 [T] the token after each, bool [T] whether it is of the same document)."""
    targets = tokens.roll(-1)
    predicts = torch.ones_like(tokens, dtype=torch.bool)
    predicts[cu_seqlens[1:].long() - 1] = False
    return targets, predicts


def log_probs_of(logits_TV: Tensor, tokens: Tensor, cu_seqlens: Tensor) -> dict[str, Tensor]:
    """`log_probs` and `predicts` from logits of any dtype, computed in fp32."""
    targets, predicts = next_tokens(tokens, cu_seqlens)
    wide = logits_TV.float()
    log_probs = wide.gather(-1, targets[:, None].to(wide.device)).squeeze(-1) - wide.logsumexp(-1)
    return {"log_probs": log_probs.cpu() * predicts, "predicts": predicts}


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's shape and values; the dtype does not count, so that bf16 equals its copy in fp32."""
    values = tensor.detach().float().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(f"{tuple(tensor.shape)}".encode() + values.numpy().tobytes()).hexdigest()


def flat(value: Tensor) -> Tensor:
    """[T, 1, D] or [1, T, D] -> [T, D]."""
    return value.reshape(-1, value.size(-1))


def hook(stack: contextlib.ExitStack, module: nn.Module, take: Callable) -> None:
    """Give every output of a module to `take`, until the stack is closed."""
    handle = module.register_forward_hook(lambda _module, _inputs, output: take(output))
    stack.callback(handle.remove)


def shadow(stack: contextlib.ExitStack, holder: object, name: str, value: object) -> None:
    """Set an attribute until the stack is closed; one of the class or module is shadowed, not lost."""
    own = name in vars(holder)
    before = getattr(holder, name)
    setattr(holder, name, value)
    stack.callback(setattr, holder, name, before) if own else stack.callback(delattr, holder, name)
