"""What the base's layers get in the native layout: a query latent that changes nothing but an eps, and an indexer.

With x the hidden state, v its mean square and w = input_layernorm.weight, attention reads w x / sqrt(v + eps). The latent
divides by w, normalises again and multiplies by w, so that it is f(v) times what a plain projection read,

    f(v) = 1 / sqrt(v / (v + eps) + eps),

which is 1 but where v is small: the eps enters twice. Zeros in w cannot be divided by, and are refused.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_patch.errors import UserError
from megatron_patch.io.safetensors_dir import SafetensorsDir
from megatron_patch.model.architecture import DsaSettings

_EMBEDDING = "model.embed_tokens.weight"
_ROWS = 8192  # of the embedding at once
# Kernel limits of vLLM, SGLang and Ascend, from their code. A small model is for transformers then.
SERVED_HEAD_DIM, SERVED_HEADS, SERVED_TOPK = 128, (32, 64), 2048


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}.self_attn."


def query_latent(norm: Tensor) -> dict[str, Tensor]:
    """`q_a_proj.weight` [D, D] and `q_a_layernorm.weight` [D] of a layer whose input norm has weights `norm` [D].

    Both in the dtype of `norm`, in which 1/w is rounded: the product with w is then off by up to half its last place.

    Raises:
        ValueError: a weight is zero, or has no finite inverse in its dtype.
    """
    inverse = (1 / norm.float()).to(norm.dtype)
    if not inverse.isfinite().all():
        raise ValueError(f"{int((~inverse.isfinite()).sum())} of {norm.numel()} weights are zero or too small to be divided by")
    return {"q_a_proj.weight": torch.diag(inverse), "q_a_layernorm.weight": norm.clone()}


def latents_of_base(source: SafetensorsDir, num_layers: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """(layer, its query latent's tensors) of each layer of a base.

    Raises:
        UserError: a norm weight that cannot be divided by, with its layer.
    """
    for layer in range(num_layers):
        name = f"model.layers.{layer}.input_layernorm.weight"
        try:
            yield layer, query_latent(source.load(name))
        except ValueError as error:
            raise UserError(
                f"the native layout divides by the base's norm weights: {name} in {source.path}: {error}; "
                "use --layout hybrid, which needs no query latent in the base's layers"
            ) from None


def neutral_indexer(shapes: Mapping[str, tuple[int, ...]], layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """An indexer that scores every key 0, by full name: right only where every key is selected anyway."""
    names = [name for name in shapes if name.startswith(layer_prefix(layer) + "indexer.")]
    make = {name: torch.ones if name.endswith("k_norm.weight") else torch.zeros for name in names}
    return {name: make[name](shapes[name], dtype=dtype) for name in names}


def is_neutral(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is that of `neutral_indexer`."""
    return bool((tensor == (1 if name.endswith("k_norm.weight") else 0)).all())


def write_base_additions(
    source: SafetensorsDir,
    num_layers: int,
    dtype: torch.dtype,
    output: Path,
    indexer: Callable[[int], Mapping[str, Tensor]],
    most_bytes: int,
) -> dict[str, tuple[str, int]]:
    """Write latents and indexers of the base's layers in shards of at most about `most_bytes`.

    Args:
        indexer: layer -> its indexer's tensors by full name, in any dtype.

    Returns:
        Tensor name -> (file, bytes).
    """
    part: dict[str, Tensor] = {}
    placed: dict[str, tuple[str, int]] = {}
    number = 0

    def flush() -> None:
        nonlocal number
        number += 1
        file = f"model-native-{number:05d}.safetensors"
        save_file(part, output / file, metadata={"format": "pt"})
        placed.update({name: (file, tensor.nbytes) for name, tensor in part.items()})
        part.clear()

    for layer, latent in latents_of_base(source, num_layers):
        tensors = {layer_prefix(layer) + name: tensor for name, tensor in latent.items()} | dict(indexer(layer))
        if part and sum(t.nbytes for t in [*part.values(), *tensors.values()]) > most_bytes:
            flush()
        part |= {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    flush()
    return placed


def eps_factor(mean_square: Tensor, eps: float) -> Tensor:
    """f(v) of the module's docstring, in fp64."""
    v = mean_square.double()
    return (v / (v + eps) + eps).rsqrt()


@dataclass(frozen=True)
class EpsEffect:
    """|f(v) - 1| over the rows of the embedding, which are what layer 0 reads; rows of zeros are left out."""

    median: float
    largest: float
    rows: int
    zero_rows: int


def eps_effect(source: SafetensorsDir, eps: float) -> EpsEffect:
    """Measure the effect at layer 0, where hidden states are smallest; deeper layers read larger ones (`check` shows)."""
    embedding = source.load(_EMBEDDING)
    v = torch.cat([part.double().square().mean(-1) for part in embedding.split(_ROWS)])
    off = (eps_factor(v[v > 0], eps) - 1).abs()
    if not off.numel():
        return EpsEffect(0.0, 0.0, 0, v.numel())
    return EpsEffect(float(off.median()), float(off.max()), off.numel(), int((v == 0).sum()))


def kernel_notes(dsa: DsaSettings) -> list[str]:
    """What the engines' kernels would refuse, one note each; transformers runs any size."""
    rows = [
        (dsa.index_head_dim == SERVED_HEAD_DIM, "index_head_dim", str(SERVED_HEAD_DIM), dsa.index_head_dim),
        (dsa.index_n_heads in SERVED_HEADS, "index_n_heads", " or ".join(map(str, SERVED_HEADS)), dsa.index_n_heads),
        (dsa.index_topk == SERVED_TOPK, "index_topk", str(SERVED_TOPK), dsa.index_topk),
    ]
    return [
        f"{name} is {value}: the kernels of vLLM, SGLang and vllm-ascend are built for {wanted}, and may refuse this model"
        for served, name, wanted, value in rows
        if not served
    ]
