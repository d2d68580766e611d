"""DeepSeek-V2 and V2-Lite, and what `dsa-upcycle export` makes of them (the same type with `dsa_layers`).

Softmax over all experts, not renormalised in V2-Lite: dropping experts shrinks the denominator, so the routed mass grows.
V2-Lite chooses greedily; V2 by groups whose score is their best expert.
Source: transformers' modeling_deepseek_v2.py.
"""

from dataclasses import replace

from .family import HF_NAMING, Family

FAMILY = Family(
    model_type="deepseek_v2",
    model_class="DeepseekV2ForCausalLM",
    namings=(replace(HF_NAMING, bias=None),),
    router="softmax",
    # transformers ignores norm_topk_prob here; the engines obey it. Both leave the mass alone only where it is set.
    normalised=None,
    group_members=1,
    grouped_when=("topk_method", "group_limited_greedy"),
    expert_parts=(frozenset({"weight"}), frozenset({"weight", "weight_scale_inv"})),
)
