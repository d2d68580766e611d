"""DeepSeek-V3, V3-0324, V3.1 and R1.

Sigmoid scores plus a bias choose, the scores alone weigh; a group's score is the sum of its best two. FP8 experts come as
`weight` and `weight_scale_inv` (one scale per 128x128 block). The MTP layer is layer `num_hidden_layers` with a full set
of experts, which transformers never loads.
Source: transformers' modeling_deepseek_v3.py; README_WEIGHTS.md of DeepSeek-V3.
"""

from .family import HF_NAMING, Family

FAMILY = Family(
    model_type="deepseek_v3",
    model_class="DeepseekV3ForCausalLM",
    namings=(HF_NAMING,),
    router="sigmoid",
    normalised=None,
    group_members=2,
    grouped_when=None,
    expert_parts=(frozenset({"weight"}), frozenset({"weight", "weight_scale_inv"})),
)
