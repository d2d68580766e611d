"""A whole DSA layer from our op and rope, against an implementation we did not write: transformers' `deepseek_v32`.

Where it differs from ours, and why the comparison holds all the same:

* it scales q.k by E**-0.5 and the weights by J**-0.5, ours scales the weights by both: equal up to rounding, as relu is
  positively homogeneous;
* its MLA returns the interleaved rotation de-interleaved: the same permutation on query and key;
* it runs the indexer under `no_grad` and has no KL: nothing to compare there;
* it selects by `torch.topk`, whose order among equal scores is arbitrary; ours takes the newest: a key chosen by one
  alone must be a near-tie, which is proven below in fp64;
* like ours it omits the Hadamard rotation (orthogonal, so scores are unchanged).
"""

import pytest
import torch
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding

from megatron_patch.ops import reference
from megatron_patch.ops import rope as rope_ops
from megatron_patch.ops.reference import dsa_attention, index_scores
from megatron_patch.ops.rope import apply_rope_half_split, apply_rope_interleaved

from .inputs import as_sets
from .layer import dsa_layer

HIDDEN, HEADS, NOPE, ROPE, VALUE, LATENT, Q_RANK, INDEX_DIM = 48, 3, 16, 8, 12, 24, 48, 20
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


def _layer(rope: dict, topk: int, index_heads: int, seed: int):
    config = DeepseekV32Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS, qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE, v_head_dim=VALUE, kv_lora_rank=LATENT, q_lora_rank=Q_RANK, index_topk=topk,
        index_head_dim=INDEX_DIM, index_n_heads=index_heads, rope_parameters=dict(rope), attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(seed)
    layer = DeepseekV32Attention(config, 0)
    for name, parameter in layer.named_parameters():
        if "norm.weight" in name:  # away from 1, so that a lost norm shows
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return layer, DeepseekV32RotaryEmbedding(config)


def _theirs(layer, rotary, x_ND):
    """(output [N, hidden], indices [N, k] in any order, with masked keys in short rows)."""
    n = x_ND.shape[0]
    mask = torch.full((n, n), torch.finfo(x_ND.dtype).min, dtype=x_ND.dtype).triu(1)[None, None]
    seen = []
    hook = layer.indexer.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    out, _ = layer(x_ND[None], rotary(x_ND, torch.arange(n)[None]), mask)
    hook.remove()
    return out[0], seen[0]


def _ours(layer, x_TD, cu_seqlens, topk, rope, **options):
    """The same weights through our rope and op; also returns what the index scores are made of."""
    w = dict(layer.named_parameters())
    return dsa_layer(w, x_TD, cu_seqlens, heads=HEADS, rope_parameters=rope, topk=topk, **options)


def _differing_rows(index, ours: list[list[int]], theirs: torch.Tensor, topk: int) -> int:
    """Rows whose sets differ. Each key in dispute must lie, in fp64, within rounding of the k-th best score."""
    exact = index_scores(*(x.double() for x in index))
    rows = 0
    for t, (mine, row) in enumerate(zip(ours, theirs.tolist(), strict=True)):
        other = {s for s in row if s <= t}  # short rows: torch.topk fills up with masked keys
        assert len(mine) == len(other) == min(topk, t + 1)
        disputed = set(mine) ^ other
        rows += bool(disputed)
        kth = exact[t, : t + 1].topk(len(mine)).values[-1]
        tolerance = 1e-5 * exact[t, : t + 1].abs().max()  # fp32 rounding of a sum of index_heads products
        assert all((exact[t, s] - kth).abs() <= tolerance for s in disputed), (t, disputed)
    return rows


@pytest.mark.parametrize("rope", [YARN, DEFAULT], ids=["yarn", "default"])
@pytest.mark.parametrize("seed", [0, 1])
def test_layer_equals_deepseek_v32(rope, seed):
    """Output to 1e-5, the selected sets and the gradient of the input, at 6 times as many tokens as top-k."""
    topk, n = 16, 96
    layer, rotary = _layer(rope, topk, index_heads=32, seed=seed)
    x = torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    expected, chosen = _theirs(layer, rotary, x)
    got, result, index = _ours(layer, x, torch.tensor([0, n], dtype=torch.int32), topk, rope)
    assert _differing_rows(index, as_sets(result.indices), chosen, topk) == 0
    assert (got - expected).abs().max() <= 1e-5
    noise = torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(9))
    (ours_x,), (theirs_x,) = (torch.autograd.grad((y * noise).sum(), x) for y in (got, expected))
    assert (ours_x - theirs_x).abs().max() <= 1e-5 * theirs_x.abs().max()
    dense, _, _ = _ours(layer, x, torch.tensor([0, n], dtype=torch.int32), topk, rope, stage="dense")
    assert (dense - expected).abs().max() > 1e-2  # else the selection would not have been tested


def test_few_index_heads_tie_and_every_dispute_is_a_tie():
    """With 2 heads relu makes whole rows of zeros: the two implementations may differ there, and only there."""
    topk, n = 16, 96
    layer, rotary = _layer(YARN, topk, index_heads=2, seed=3)
    x = torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected, chosen = _theirs(layer, rotary, x)
        cu_seqlens = torch.tensor([0, n], dtype=torch.int32)
        got, result, index = _ours(layer, x, cu_seqlens, topk, YARN)
        ours = as_sets(result.indices)
        assert 0 < _differing_rows(index, ours, chosen, topk) < n / 4
        same = torch.tensor([set(a) == {s for s in b if s <= t} for t, (a, b) in enumerate(zip(ours, chosen.tolist()))])
        assert (got - expected)[same].abs().max() <= 1e-5
        # Given their choice, every row agrees.
        theirs = torch.where(chosen <= torch.arange(n)[:, None], chosen, n).sort(-1).values
        forced = torch.where(theirs < n, theirs, -1)
        got, _, _ = _ours(layer, x, cu_seqlens, topk, YARN, indices=forced)
        assert (got - expected).abs().max() <= 1e-5


def test_packed_documents_equal_separate_calls():
    """deepseek_v32 knows no packing: one call a document is what a pack must reproduce, positions restarting."""
    topk, lengths = 8, [30, 50]
    layer, rotary = _layer(YARN, topk, index_heads=32, seed=5)
    x = torch.randn(80, HIDDEN, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = torch.cat([_theirs(layer, rotary, part)[0] for part in x.split(lengths)])
        got, _, _ = _ours(layer, x, torch.tensor([0, 30, 80], dtype=torch.int32), topk, YARN)
    assert (got - expected).abs().max() <= 1e-5


def _interleaved(x, cos, sin):
    return torch.cat([apply_rope_interleaved(x[..., :ROPE], cos, sin), x[..., ROPE:]], -1)


def _rope_last(x, cos, sin):
    return apply_rope_half_split(x.flip(-1), cos, sin).flip(-1)


@pytest.mark.parametrize(
    "owner, name, wrong",
    [
        (rope_ops, "apply_rope_half_split", _interleaved),
        (rope_ops, "apply_rope_half_split", _rope_last),
        (rope_ops, "apply_rope_half_split", lambda x, cos, sin: x),
        (torch.nn.functional, "layer_norm", lambda x, *args: x),
        (reference, "dsa_attention", lambda *args, **o: dsa_attention(*args, **o | {"softmax_scale": 24**-0.5})),
    ],
    ids=["indexer_rope_interleaved", "indexer_rope_last", "indexer_no_rope", "no_k_norm", "no_yarn_in_softmax_scale"],
)
def test_the_comparison_notices_a_known_confusion(owner, name, wrong, monkeypatch):
    """What other systems do differently moves the output a thousand tolerances: else the tests above prove little."""
    topk, n = 16, 96
    layer, rotary = _layer(YARN, topk, index_heads=32, seed=0)
    x = torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(owner, name, wrong)
    with torch.no_grad():
        got, _, _ = _ours(layer, x, torch.tensor([0, n], dtype=torch.int32), topk, YARN)
        monkeypatch.undo()
        expected, _ = _theirs(layer, rotary, x)
    assert (got - expected).abs().max() > 1e-2
