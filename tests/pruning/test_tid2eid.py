"""Hash tables after pruning: every token id routes to distinct survivors, near the experts it had, under the cap."""

import pytest
import torch

from megatron_patch.pruning import tid2eid

V, K, E, H = 600, 4, 32, 16


def make(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(V, E, generator=generator).topk(K).indices
    return table, torch.randn(E, H, generator=generator)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("keep", [4, 5, 16, 31])
def test_rows_are_distinct_in_range_and_survivors_keep_their_tokens(seed, keep):
    table, router = make(seed)
    kept = sorted(torch.randperm(E, generator=torch.Generator().manual_seed(seed))[:keep].tolist())
    result = tid2eid.rewrite(table, router, kept, tid2eid.expert_load(table, None, E))
    assert tid2eid.faults(result.table, keep) is None
    old = torch.tensor(kept)[result.table]
    for before, after in zip(table.tolist(), old.tolist()):
        assert set(before) & set(kept) <= set(after)
    assert set(result.moved_to) == set(range(E)) - set(kept) and set(result.moved_to.values()) <= set(kept)


@pytest.mark.parametrize("seed", range(5))
def test_traffic_stays_under_the_cap_also_where_it_is_skewed(seed):
    """The mean load is of the survivors; an expert's load is its observed tokens and one per entry."""
    table, router = make(seed)
    router[:] = router[:1] + 0.01 * router  # all alike: everything wants the same survivor
    count = torch.rand(E, generator=torch.Generator().manual_seed(seed)).pow(2) * 1000
    load = tid2eid.expert_load(table, count, E)
    kept = load.argsort(descending=True)[: E // 2].sort().values.tolist()
    result = tid2eid.rewrite(table, router, kept, load)
    own = load[kept].max() / (load.sum() / len(kept))  # what no mapping can lower
    assert result.max_load <= max(tid2eid.LOAD_CAP, float(own)) + 1e-9
    # recounted from the table itself
    per_entry = load / torch.bincount(table.reshape(-1), minlength=E)
    recounted = torch.zeros(len(kept), dtype=torch.float64)
    kept_set, slot_of = set(kept), {e: i for i, e in enumerate(kept)}
    for before, after in zip(table.tolist(), result.table.tolist()):
        for slot, expert in enumerate(before):
            assert expert not in kept_set or after[slot] == slot_of[expert]
            recounted[after[slot]] += per_entry[expert]
    assert float(recounted.max() / recounted.mean()) == pytest.approx(result.max_load)


def test_the_most_similar_survivor_takes_over():
    table = torch.tensor([[0, 1], [2, 3], [0, 3], [4, 1]])
    router = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1], [0.9, 0.1]])
    result = tid2eid.rewrite(table, router, [0, 1, 2, 3], torch.ones(5))
    assert result.moved_to == {4: 0} and result.table.tolist() == [[0, 1], [2, 3], [0, 3], [0, 1]]


def test_a_token_that_was_never_seen_still_routes():
    table, router = make()
    result = tid2eid.rewrite(table, router, list(range(0, E, 2)), tid2eid.expert_load(table, torch.zeros(E), E))
    assert result.table.shape == (V, K) and tid2eid.faults(result.table, E // 2) is None


def test_deterministic_and_of_the_source_dtype():
    table, router = make()
    load = tid2eid.expert_load(table, None, E)
    first = tid2eid.rewrite(table.int(), router, list(range(8)), load)
    again = tid2eid.rewrite(table.int(), router, list(range(8)), load)
    assert first.table.dtype == torch.int32 and torch.equal(first.table, again.table)
    assert torch.equal(tid2eid.rewrite(table, router, list(range(E)), load).table, table)


def test_faults_are_named():
    assert "token 1" in tid2eid.faults(torch.tensor([[0, 1], [1, 1]]), 2)
    assert "out of 0 to 1" in tid2eid.faults(torch.tensor([[0, 2]]), 2)
    assert "out of 0 to 1" in tid2eid.faults(torch.tensor([[0, -1]]), 2)
