"""An oracle of pruning that is not the package's: the source model, forbidden to use the dropped experts.

Where a selection bias chooses, it is -inf for dropped experts. A softmax router gets logits of -inf before its softmax,
which is what removing rows does. A hash-routed layer gets the pruned table in old numbers. Everything else is
transformers' own code; `megatron_patch.pruning.masked` has a softmax router of its own instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_patch.pruning.load import load_model
from megatron_patch.pruning.verify_logits import logits_and_mass

_NEG_INF = float("-inf")


def load(path: str | Path) -> nn.Module:
    return load_model(path, dtype="float32")


def logits_of(path: str | Path, tokens: Tensor) -> Tensor:
    return logits_and_mass(load(path), tokens)[0]


class _MaskedLinear(TorchFunctionMode):
    """Inside, the result of a linear map is -inf in the dropped columns."""

    def __init__(self, dropped_E: Tensor):
        super().__init__()
        self.dropped_E = dropped_E

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is nn.functional.linear:
            return result.masked_fill(self.dropped_E.to(result.device), _NEG_INF)
        return result


def routers(model: nn.Module) -> dict[int, nn.Module]:
    """The routers of a loaded model by their layer's number."""
    found = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[-2:] == ["mlp", "gate"]:
            found[int(parts[-3])] = module
    return found


@contextmanager
def masked(model: nn.Module, kept: dict[int, list[int]], tables: dict[int, Tensor] | None = None) -> Iterator[None]:
    """Forbid every layer's dropped experts while the block runs.

    Args:
        model: the source model.
        kept: experts that stay, by layer; layers that the model does not have (MTP) are passed over.
        tables: of hash-routed layers, the table to route by, in the source's expert numbers.
    """
    restore = []
    for number, router in routers(model).items():
        dropped = torch.ones(router.weight.shape[0], dtype=torch.bool)
        dropped[kept[number]] = False
        table = getattr(router, "tid2eid", None)
        bias = getattr(router, "e_score_correction_bias", None)
        if table is not None:
            restore.append((table, table.clone()))
            if tables and number in tables:
                table.copy_(tables[number])
        elif bias is not None:
            restore.append((bias, bias.clone()))
            bias.masked_fill_(dropped, _NEG_INF)
        else:
            forward = router.forward

            def forward_masked(*args: Any, forward: Any = forward, dropped: Tensor = dropped, **kwargs: Any) -> Any:
                with _MaskedLinear(dropped):
                    return forward(*args, **kwargs)

            router.forward = forward_masked
            restore.append((router, forward))
    try:
        yield
    finally:
        for what, before in restore:
            if isinstance(what, Tensor):
                what.copy_(before)
            else:
                what.forward = before


@contextmanager
def reconfigured(model: nn.Module, config_changes: dict[str, tuple]) -> Iterator[None]:
    """Route with the plan's changes of config.json while the block runs: groups, and the scale of routed weights."""
    names = {"n_group": "num_group", "topk_group": "topk_group", "routed_scaling_factor": "routed_scaling_factor"}
    new = {names[key]: value for key, (_, value) in config_changes.items() if key in names}
    before = [(router, {name: getattr(router, name) for name in new}) for router in routers(model).values()]
    for router, _ in before:
        vars(router).update(new)
    try:
        yield
    finally:
        for router, values in before:
            vars(router).update(values)
