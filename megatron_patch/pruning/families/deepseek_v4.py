"""DeepSeek-V4-Flash and relatives of its `model_type`.

sqrt(softplus) scores plus a bias choose, without groups; the chosen scores are normalised. The first layers are routed by
token id instead: `gate.tid2eid` names the experts of each id. Routed experts are FP4 (two e2m1 per int8, an e8m0 `scale`
per 32) or FP8; MTP layers have names of their own. `compress_ratios` may be longer than the layers and is not touched.
Source: transformers' modeling_deepseek_v4.py and conversion_mapping.py.
"""

from dataclasses import replace

from .family import Family, Naming

_NATIVE = Naming(
    name="layers.N.ffn",
    layer=r"layers\.(\d+)\.",
    mtp=r"mtp\.(\d+)\.",
    moe="ffn.",
    projections=("w1", "w2", "w3"),
    router="gate.weight",
    bias="gate.bias",
    table="gate.tid2eid",
)
# Copies with a `model.` prefix are in circulation; the source's way is written again.
_PREFIXED = replace(
    _NATIVE, name="model.layers.N.ffn", layer=r"model\.layers\.(\d+)\.", mtp=r"(?:model\.)?mtp\.(\d+)\."
)
_HF = replace(
    _PREFIXED,
    name="model.layers.N.mlp",
    moe="mlp.",
    projections=("gate_proj", "up_proj", "down_proj"),
    bias="gate.e_score_correction_bias",
)
FAMILY = Family(
    model_type="deepseek_v4",
    model_class="DeepseekV4ForCausalLM",
    namings=(_NATIVE, _PREFIXED, _HF),
    router="sqrtsoftplus",
    normalised=True,
    group_members=0,
    grouped_when=None,
    expert_parts=(
        frozenset({"weight"}),
        frozenset({"weight", "scale"}),
        frozenset({"weight", "weight_scale_inv"}),
    ),
    all_moe=True,
    hash_layers_key="num_hash_layers",
)
