"""The last claim of `prune verify`: the source model, forbidden to use the dropped experts, gives the pruned one's logits."""

from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_patch.claims import Failed, Skipped
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.hooks import moe_blocks
from megatron_patch.pruning.load import load_model
from megatron_patch.pruning.masked import masked, reconfigured
from megatron_patch.pruning.verify_checks import Pair

TOLERANCE = 1e-5  # of logits in fp32: the sums over experts are the same, matrix products may be blocked otherwise
_TOKENS = 32
_FLOATS = {"F32", "BF16", "F16"}


def logits(pair: Pair, wanted: bool, sound: bool, max_model_gb: float) -> str:
    """Logits of the pruned model against the source's with the dropped experts forbidden, in fp32."""
    if not wanted:
        raise Skipped("left out by --no-logits")
    if not sound:
        raise Skipped("not tried, for another check failed")
    _require_runnable(pair.source, max_model_gb)
    vocabulary = pair.source.config["vocab_size"]
    tokens = torch.randint(vocabulary, (2, _TOKENS), generator=torch.Generator().manual_seed(0))
    tables = {}  # as they are written, in old numbers
    for number in pair.plan.tid2eid:
        table = pair.pruned.load(pair.pruned.layers[number].table).long()
        tables[number] = torch.tensor(pair.plan.kept[number])[table]
    kept = {number: experts for number, experts in pair.plan.kept.items() if not pair.source.layers[number].mtp}
    model = _load(pair.source.path)
    with reconfigured(model, pair.plan.config_changes), masked(model, kept, tables):
        expected, _ = logits_and_mass(model, tokens)
    _, mass_before = logits_and_mass(model, tokens)
    del model
    found, mass_after = logits_and_mass(_load(pair.path), tokens)
    if not found.isfinite().all():
        raise Failed(f"{int((~found.isfinite()).sum())} of {found.numel()} logits are not finite")
    apart = float((found - expected).abs().max())
    scale = max(1.0, float(expected.abs().max()))
    detail = (
        f"largest difference {apart:.1e} over {tokens.numel()} tokens (logits up to {scale:.1f}); "
        f"routed mass {mass_before:.3f} -> {mass_after:.3f}"
    )
    if apart > TOLERANCE * scale:
        raise Failed(f"{detail}, more than {TOLERANCE:g} of them")
    return detail


def _require_runnable(source: MoeCheckpoint, max_model_gb: float) -> None:
    other = sorted({t.dtype for t in source.tensors.values()} - _FLOATS - {"I64", "I32"})
    if other or "quantization_config" in source.config:
        raise Skipped(f"the weights are quantised ({', '.join(other) or 'config.json'}); a rollout engine can run them")
    size = sum(torch.Size(t.shape).numel() * 4 for t in source.tensors.values())
    if size > max_model_gb * 1e9:
        raise Skipped(f"the source takes {size / 1e9:.1f} GB in fp32, more than --max-model-gb {max_model_gb:g}")


def _load(path: Path) -> nn.Module:
    return load_model(path, dtype="float32", otherwise="leave the logits out with --no-logits")


@torch.no_grad()
def logits_and_mass(model: nn.Module, tokens: Tensor) -> tuple[Tensor, float]:
    """Logits [batch, tokens, vocabulary] and the mean sum of a token's routing weights."""
    masses: list[float] = []
    hooks = [
        block.gate.register_forward_hook(lambda _m, _i, output: masses.append(float(output[1].sum(-1).mean())))
        for block in moe_blocks(model).values()
    ]
    try:
        logits = model(tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits, sum(masses) / max(len(masses), 1)
