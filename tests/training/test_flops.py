"""FLOPs of a step: the formulas against what PyTorch counts in the model that runs, and against plain loops."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_patch.model.architecture import read_architecture
from megatron_patch.model.builder import forward_pack
from megatron_patch.model.dsa_state import DENSE
from megatron_patch.planning.flops import FlopsCounter
from tests.model.build import TINY_DSA, tiny_model
from tests.model.test_indexed_attention import indexed_model

PATTERN = ("mla",) * 3 + ("dsa",) * 2


def test_a_step_of_the_model_costs_what_is_counted(device, tiny_base):
    """Documents of one token: there a masked pair is no pair, so the formulas and the kernels count alike."""
    model, state, _ = tiny_model(tiny_base, init="copy")
    n = 64
    tokens = torch.randint(0, 320, (n,), generator=torch.Generator().manual_seed(1))
    state.stage, state.kl_grad_scale, state.counted = DENSE, 1.0, None
    with FlopCounterMode(display=False) as measured:
        forward_pack(model, tokens, torch.arange(n + 1, dtype=torch.int32), tokens).sum().backward()
    counted = FlopsCounter(read_architecture(tiny_base), PATTERN, TINY_DSA)([1] * n, dense=True)
    # Left over: the first DSA layer's input needs no gradient, and the op computes the indexer's loss.
    assert counted.total == pytest.approx(measured.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("dense", [False, True])
def test_attention_is_counted_by_pairs(tiny_base, dense):
    arch = read_architecture(tiny_base)
    counter = FlopsCounter(arch, PATTERN, TINY_DSA)
    lengths = (3, TINY_DSA.index_topk, 20)
    # The same tokens as documents of one token differ in nothing but the pairs.
    causal = chosen = -sum(lengths)
    for length in lengths:
        for query in range(length):
            causal += query + 1
            chosen += query + 1 if dense else min(query + 1, TINY_DSA.index_topk)
    found, alone = counter(lengths, dense), counter([1] * sum(lengths), dense)
    per_pair = 2 * arch.num_heads * (arch.qk_head_dim + arch.v_head_dim)
    per_index_pair = 2 * TINY_DSA.index_n_heads * TINY_DSA.index_head_dim
    assert found.frozen - alone.frozen == 3 * per_pair * causal
    assert found.dsa - alone.dsa == 3 * 2 * (per_pair * chosen + per_index_pair * causal)
    assert found.head == alone.head


def test_documents_that_a_trunk_cache_gives_cost_the_trunk_nothing(tiny_base):
    counter = FlopsCounter(read_architecture(tiny_base), PATTERN, TINY_DSA)
    whole, some, none = (counter([30, 20], False, given) for given in ([30, 20], [20], []))
    assert whole == counter([30, 20], False) and none.frozen == 0 and some.frozen == counter([20], False).frozen
    assert some.total - some.frozen == none.total == whole.total - whole.frozen


def test_a_step_of_the_bases_indexers_costs_what_is_counted(device, tiny_base):
    model, state = indexed_model(tiny_base)
    n = 64
    tokens = torch.randint(0, 320, (n,), generator=torch.Generator().manual_seed(1))
    state.stage, state.kl_grad_scale, state.counted = DENSE, 1.0, None
    with FlopCounterMode(display=False) as measured:
        state.attach_kept(forward_pack(model, tokens, torch.arange(n + 1, dtype=torch.int32), tokens)).sum().backward()
    counter = FlopsCounter(read_architecture(tiny_base), PATTERN[:3], TINY_DSA, base_indexers=True)
    assert counter([1] * n, dense=True).total == pytest.approx(measured.get_total_flops(), rel=0.02)
    per_token = counter([1] * n, dense=True).total / n
    assert counter([n], dense=True).total > n * per_token  # pairs count too
