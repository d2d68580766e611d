"""The known numerical faults of DSA models, by id: what parity looks for, tests plant and reports name.

Every one was met in a public code base or run (docs/parity.md says where). The value of a member is its id in
`parity.json` and in benchmarks.
"""

from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """Ids."""

    INDEXER_ROPE_INTERLEAVED = "indexer_rope_interleaved"
    INDEXER_ROPE_DIMS_LAST = "indexer_rope_dims_last"
    Q_LATENT_UNNORMED = "q_latent_unnormed"
    K_NORM_EPS = "k_norm_eps_1e5"
    K_NORM_NO_BIAS = "k_norm_no_bias"
    MSCALE_ALL_DIM_0 = "mscale_all_dim_0"
    EXPERTS_SWAPPED = "experts_swapped"
    ROUTER_BIAS_MISSING = "router_bias_missing"
    POSITIONS_OFF_BY_ONE = "positions_off_by_one"
    ROUTER_BF16 = "router_bf16"
    SHARED_EXPERT_SCALED = "shared_expert_scaled"
    STALE_TOPK_RECOMPUTE = "stale_topk_recompute"
    ATTENTION_LEAKS_DOCUMENTS = "attention_leaks_documents"
    SIGMOID_ROUTER = "sigmoid_router"


@dataclass(frozen=True)
class Description:
    """Where a fault sits (a module of `diagnosis.parity`, or "recompute") and what it is, in one line."""

    module: str
    text: str


FAULTS = {
    Fault.INDEXER_ROPE_INTERLEAVED: Description(
        "indexer", "RoPE of index queries and keys turns neighbours (2i, 2i+1); it is half-split in the indexer"
    ),
    Fault.INDEXER_ROPE_DIMS_LAST: Description(
        "indexer", "RoPE of index queries and keys turns the last dimensions of a head; it is the first"
    ),
    Fault.Q_LATENT_UNNORMED: Description(
        "indexer", "index queries come from the query latent before its norm; it is the normed one"
    ),
    Fault.K_NORM_EPS: Description("indexer", "k_norm adds 1e-5 to the variance; it is 1e-6"),
    Fault.K_NORM_NO_BIAS: Description("indexer", "k_norm has no bias; it is a LayerNorm with one"),
    Fault.MSCALE_ALL_DIM_0: Description(
        "attention", "YaRN's mscale_all_dim is 0, so that the softmax scale lacks its square"
    ),
    Fault.EXPERTS_SWAPPED: Description("experts", "two experts stand in each other's place"),
    Fault.ROUTER_BIAS_MISSING: Description("router", "the selection bias of a sigmoid router is left out"),
    Fault.POSITIONS_OFF_BY_ONE: Description("attention", "queries are one position ahead of (or behind) their keys"),
    Fault.ROUTER_BF16: Description("router", "router logits are rounded to bf16; they are fp32"),
    Fault.SHARED_EXPERT_SCALED: Description("shared", "the shared experts' output carries a factor"),
    Fault.STALE_TOPK_RECOMPUTE: Description(
        "recompute", "the backward pass attends to other keys than the forward pass did"
    ),
    Fault.ATTENTION_LEAKS_DOCUMENTS: Description("attention", "tokens attend to other documents of their pack"),
    Fault.SIGMOID_ROUTER: Description("router", "routing weights are sigmoids; the model's router is a softmax"),
}
