"""The oracle of pruning: the source model, forbidden to use the dropped experts, must give the pruned model's logits.

Where a selection bias chooses, it is -inf for dropped experts (0 would win over negative biases). A softmax router gets
logits of -inf before its softmax, which is what removing rows does. A hash-routed layer gets the pruned table in old
numbers. Everything else is transformers' own code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_patch.errors import UserError
from megatron_patch.pruning.config_json import read_config
from megatron_patch.pruning.moe_layers import CLASSES

_NEG_INF = float("-inf")

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


def load_model(path: str | Path) -> nn.Module:
    """A model through transformers in fp32 on the CPU, every parameter from the files; no code of the directory runs.

    Raises:
        UserError: transformers misses or reshapes a tensor, or cannot load the model.
    """
    import transformers

    config = read_config(Path(path))
    if "dsa_layers" in config:  # an upcycled export; transformers' own class would leave parts of it random
        from megatron_patch.hf_model.modeling_deepseek_v2_dsa import DeepseekV2DsaForCausalLM as model_class
    else:
        model_class = getattr(transformers, CLASSES[config["model_type"]], None)
    if model_class is None:
        raise UserError(
            f"transformers must know the model: {transformers.__version__} has no {CLASSES[config['model_type']]}; use 5.24"
        )
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list the MTP layer, tensor by tensor
    options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    try:
        model, info = model_class.from_pretrained(
            path, output_loading_info=True, use_safetensors=True, local_files_only=True, **options
        )
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"transformers must be able to load the model: {path}: {str(error)[:300]}; leave the logits out with --no-logits"
        ) from None
    finally:
        logging.set_verbosity(verbosity)
    for fault in ("missing_keys", "mismatched_keys"):
        if info[fault]:
            raise UserError(
                f"transformers must fill the model from its files: {fault} of {path}: {sorted(map(str, info[fault]))[:3]}"
            )
    return model.eval()


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


@torch.no_grad()
def logits_and_mass(model: nn.Module, tokens: Tensor) -> tuple[Tensor, float]:
    """Logits [batch, tokens, vocabulary] and the mean sum of a token's routing weights."""
    masses: list[float] = []
    hooks = [
        router.register_forward_hook(lambda _m, _i, output: masses.append(float(output[1].sum(-1).mean())))
        for router in routers(model).values()
    ]
    try:
        logits = model(tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits, sum(masses) / max(len(masses), 1)
