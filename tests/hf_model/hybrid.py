"""A tiny hybrid directory: a tiny base, random DSA layers on top, and the code that an export carries."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_patch import hf_model
from megatron_patch.model.architecture import DsaSettings
from tests.tiny import tiny_state

SETTINGS = DsaSettings(index_topk=8, index_n_heads=4, index_head_dim=16)
CODE = ("configuration_deepseek_v2_dsa.py", "modeling_deepseek_v2_dsa.py")


def dsa_layer_state(config: dict, layer: int, settings: DsaSettings, seed: int) -> dict[str, torch.Tensor]:
    """Random weights of one new layer: a MoE layer of the base whose query is low-rank, and an indexer."""
    one = config | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    state = {n: x for n, x in tiny_state(one, seed).items() if n.startswith("model.layers.0.")}
    plain_query = state.pop("model.layers.0.self_attn.q_proj.weight")
    g, hidden = torch.Generator().manual_seed(seed), config["hidden_size"]
    j, e, attention = settings.index_n_heads, settings.index_head_dim, "model.layers.0.self_attn"
    new = {
        "q_a_proj.weight": torch.randn(hidden, hidden, generator=g) * 0.15,
        "q_a_layernorm.weight": 0.5 + torch.rand(hidden, generator=g),
        "q_b_proj.weight": torch.randn(*plain_query.shape, generator=g) * 0.15,
        "indexer.wq_b.weight": torch.randn(j * e, hidden, generator=g) * 0.15,
        "indexer.wk.weight": torch.randn(e, hidden, generator=g) * 0.15,
        "indexer.k_norm.weight": 0.5 + torch.rand(e, generator=g),
        "indexer.k_norm.bias": torch.randn(e, generator=g) * 0.3,
        "indexer.weights_proj.weight": torch.randn(j, hidden, generator=g) * 0.15,
    }
    state |= {f"{attention}.{n}": x for n, x in new.items()}
    return {n.replace("layers.0.", f"layers.{layer}."): x for n, x in state.items()}


def make_tiny_export(
    path: Path,
    base: Path,
    *,
    n_dsa: int = 2,
    settings: DsaSettings = SETTINGS,
    identity: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
) -> Path:
    """Write a loadable directory in per-expert layout with an index; `base` must be sharded.

    identity: the new layers' o_proj and every down_proj are zero, so that they pass their input on.
    """
    path.mkdir(parents=True)
    config = json.loads((base / "config.json").read_text())
    first = config["num_hidden_layers"]
    layers = list(range(first, first + n_dsa))
    state: dict[str, torch.Tensor] = {}
    for layer in layers:
        state |= dsa_layer_state(config, layer, settings, seed + layer)
    if identity:
        for name in state:
            if "o_proj" in name or "down_proj" in name:
                state[name] = torch.zeros_like(state[name])
    index = json.loads((base / "model.safetensors.index.json").read_text())
    for file in sorted(set(index["weight_map"].values())):
        save_file({n: x.to(dtype) for n, x in load_file(base / file).items()}, path / file, metadata={"format": "pt"})
    new_file = "model-dsa-00001-of-00001.safetensors"
    save_file({n: x.to(dtype).contiguous() for n, x in state.items()}, path / new_file, metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(state, new_file)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))

    module, name = "modeling_deepseek_v2_dsa", "DeepseekV2Dsa"
    config |= {
        "architectures": [f"{name}ForCausalLM"],
        "auto_map": {
            "AutoConfig": f"configuration_deepseek_v2_dsa.{name}Config",
            "AutoModel": f"{module}.{name}Model",
            "AutoModelForCausalLM": f"{module}.{name}ForCausalLM",
        },
        "num_hidden_layers": first + n_dsa,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "dsa_layers": layers,
        "dsa_index_topk": settings.index_topk,
        "dsa_index_n_heads": settings.index_n_heads,
        "dsa_index_head_dim": settings.index_head_dim,
        "dsa_q_rank": config["hidden_size"],
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    for file in CODE:
        shutil.copy(Path(hf_model.__file__).parent / file, path / file)
    return path


def tokens(*shape: int, seed: int = 0, low: int = 3, high: int = 320) -> torch.Tensor:
    """Random token ids without the special ones."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
