"""What torch_npu's operators for DSA take, as their documents say (torch_npu's API reference; CANN 9), and by which rule the
fused KL is used. **Not run on a device**: a limit that a release has lifted is refused here all the same."""

from types import ModuleType

import torch

from megatron_patch.ops.checks import DsaSizes

INDEXER, ATTENTION = "npu_lightning_indexer", "npu_sparse_flash_attention"
FUSED_KL = "npu_sparse_lightning_indexer_grad_kl_loss"
LATENT_DIM, ROPE_DIM, INDEX_DIM = 512, 64, 128
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_INDEX_HEADS = 64
MAX_TOPK, LARGE_TOPK = 2048, (3072, 4096, 5120, 6144, 7168, 8192)
KL_HEADS, KL_INDEX_HEADS = (32, 64, 128), (8, 16, 32, 64)
KL_TOPK = (1024, 2048, *LARGE_TOPK)
KL_MAX_QUERIES = 8192  # tokens of one document
KL_MAX_DOCUMENTS = 256  # of one pack


def operators() -> ModuleType:
    """torch_npu, with what this backend calls.

    Raises:
        ValueError: torch_npu is absent, or too old.
    """
    try:
        import torch_npu
    except ImportError as error:
        raise ValueError(f"the npu backend needs torch_npu, which does not load ({error})") from None
    missing = [name for name in (INDEXER, ATTENTION) if not hasattr(torch_npu, name)]
    if missing:
        raise ValueError(f"torch_npu {getattr(torch_npu, '__version__', '?')} has no {' and no '.join(missing)}")
    return torch_npu


def check(sizes: DsaSizes) -> None:
    """Whether the operators take a model of these sizes: every documented limit, by name.

    Raises:
        ValueError: they do not, or torch_npu does not have them.
    """
    half = (torch.bfloat16, torch.float16)
    limits = (
        (sizes.dtype in half, f"{INDEXER} and {ATTENTION} take bfloat16 or float16, not {sizes.dtype}"),
        (sizes.heads in HEADS, f"{ATTENTION} takes {_or(HEADS)} heads, not {sizes.heads}"),
        (sizes.latent_dim == LATENT_DIM, f"{ATTENTION} takes a latent of {LATENT_DIM}, not {sizes.latent_dim}"),
        (sizes.rope_dim == ROPE_DIM, f"{ATTENTION} takes {ROPE_DIM} RoPE dimensions, not {sizes.rope_dim}"),
        (
            1 <= sizes.index_heads <= MAX_INDEX_HEADS,
            f"{INDEXER} takes at most {MAX_INDEX_HEADS} index heads, not {sizes.index_heads}",
        ),
        (sizes.index_dim == INDEX_DIM, f"{INDEXER} takes index heads of {INDEX_DIM}, not {sizes.index_dim}"),
        (
            1 <= sizes.topk <= MAX_TOPK or sizes.topk in LARGE_TOPK,
            f"{INDEXER} takes a top-k up to {MAX_TOPK}, or {_or(LARGE_TOPK)}, not {sizes.topk}",
        ),
    )
    broken = [text for holds, text in limits if not holds]
    if broken:
        raise ValueError("; ".join(broken))
    operators()


def fused_kl(heads: int, index_heads: int, topk: int, longest: int = 1, documents: int = 1) -> tuple[bool, str]:
    """Which form of the KL runs: (whether the fused operator takes it, the rule that decided).

    Args:
        longest: tokens of the longest document.
        documents: of the pack, empty ones left out.
    """
    if heads not in KL_HEADS:
        return False, f"the fused operator takes {_or(KL_HEADS)} attention heads, not {heads}"
    if index_heads not in KL_INDEX_HEADS:
        return False, f"the fused operator takes {_or(KL_INDEX_HEADS)} index heads, not {index_heads}"
    if topk not in KL_TOPK:
        return False, f"the fused operator takes a top-k of {_or(KL_TOPK)}, not {topk}"
    if longest > KL_MAX_QUERIES:
        return False, f"the fused operator takes documents of {KL_MAX_QUERIES} tokens, not {longest}"
    if documents > KL_MAX_DOCUMENTS:
        return False, f"the fused operator takes {KL_MAX_DOCUMENTS} documents, not {documents}"
    room = f"up to {KL_MAX_QUERIES} tokens a document and {KL_MAX_DOCUMENTS} documents a pack"
    return True, f"{heads} heads fit the fused operator, {room}; beyond, chunked"


def describe(sizes: DsaSizes) -> str:
    """What a run prints once: which form of the KL it has, and why."""
    fused, rule = fused_kl(sizes.heads, sizes.index_heads, sizes.topk)
    return f"KL {'fused' if fused else 'chunked'}: {rule}"


def _or(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
