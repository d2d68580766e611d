"""Which sample comes when: the same for every layout, and the same after a resume."""

from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_patch.data.batch import Row
from megatron_patch.data.sampler import FILLER, MicroBatches, evaluation_micro_batches, load_batches
from megatron_patch.errors import UserError


def global_batches(steps: int, dp_size: int, micro: int, size: int, **settings) -> list[list[int]]:
    """The samples of each step, put together from all ranks as they are computed."""
    ranks = [
        iter(MicroBatches(micro_batch_size=micro, global_batch_size=size, dp_rank=r, dp_size=dp_size, **settings))
        for r in range(dp_size)
    ]
    per_step = size // (micro * dp_size)
    return [[n for _ in range(per_step) for rank in ranks for n in next(rank)] for _ in range(steps)]


@pytest.mark.parametrize(("dp_size", "micro"), [(1, 1), (1, 12), (2, 3), (4, 1), (3, 2)])
def test_a_global_batch_does_not_depend_on_the_layout(dp_size, micro):
    settings = {"num_samples": 31, "seed": 5}
    assert global_batches(7, dp_size, micro, 12, **settings) == global_batches(7, 1, 4, 12, **settings)


def test_no_sample_is_left_out_between_epochs():
    """31 samples in batches of 12: the third batch holds the epoch's last 7 and the next epoch's first 5."""
    flat = list(chain(*global_batches(31, 1, 4, 12, num_samples=31, seed=5)))
    epochs = [flat[i : i + 31] for i in range(0, len(flat), 31)]
    assert len(epochs) == 12
    assert all(sorted(epoch) == list(range(31)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 12  # each epoch in an order of its own


@given(st.integers(0, 12), st.integers(1, 20))
def test_resume_equals_an_uninterrupted_run(steps, num_samples):
    whole = global_batches(15, 2, 2, 8, num_samples=num_samples, seed=1)
    resumed = global_batches(15 - steps, 2, 2, 8, num_samples=num_samples, seed=1, consumed_samples=8 * steps)
    assert resumed == whole[steps:]


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 40))
def test_what_is_upcoming_is_what_comes(done, steps, num_samples):
    settings = {"num_samples": num_samples, "seed": 1, "consumed_samples": 8 * done}
    comes = chain(*global_batches(steps, 2, 2, 8, **settings))
    order = MicroBatches(micro_batch_size=4, global_batch_size=8, **settings)
    assert order.upcoming(8 * (done + steps)).tolist() == sorted(set(comes))


def test_seed_changes_the_order_and_no_shuffle_keeps_it():
    assert global_batches(2, 1, 4, 8, num_samples=50, seed=1) != global_batches(2, 1, 4, 8, num_samples=50, seed=2)
    assert list(chain(*global_batches(2, 1, 4, 8, num_samples=10, shuffle=False))) == [*range(10), *range(6)]


@pytest.mark.parametrize(("num_samples", "steps"), [(100, 3), (24, 2), (25, 3), (7, 1)])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_evaluation_takes_each_sample_once_in_order(num_samples, steps, dp_size):
    ranks = [
        evaluation_micro_batches(
            num_samples, eval_iters=3, micro_batch_size=2, global_batch_size=12, dp_rank=r, dp_size=dp_size
        )
        for r in range(dp_size)
    ]
    assert {len(rank) for rank in ranks} == {steps * 12 // (2 * dp_size)}  # equal on all ranks: collectives match
    flat = [n for together in zip(*ranks, strict=True) for micro_batch in together for n in micro_batch]
    assert flat[: min(num_samples, 36)] == list(range(min(num_samples, 36)))
    assert set(flat[min(num_samples, 36) :]) <= {FILLER}


def test_sizes_that_do_not_divide_and_empty_data():
    with pytest.raises(UserError, match=r"10 is not a multiple of 4 x 2; use e\.g\. 8"):
        MicroBatches(5, micro_batch_size=4, global_batch_size=10, dp_size=2)
    with pytest.raises(UserError, match=r"use e\.g\. 8"):
        MicroBatches(5, micro_batch_size=4, global_batch_size=2, dp_size=2)
    with pytest.raises(UserError, match="no training samples"):
        MicroBatches(0, micro_batch_size=1, global_batch_size=1)
    with pytest.raises(UserError, match="no validation samples"):
        evaluation_micro_batches(0, eval_iters=1, micro_batch_size=1, global_batch_size=1)


class Numbers(torch.utils.data.Dataset):
    """Sample n is n, n, ..."""

    def __getitem__(self, number: int) -> Row:
        return Row(torch.full((3,), number), torch.full((3,), number), torch.ones(3))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_keeps_the_order_and_the_global_random_state(num_workers):
    state = torch.get_rng_state()
    sampler = MicroBatches(9, micro_batch_size=2, global_batch_size=4, seed=3)
    batches = islice(load_batches(Numbers(), sampler, num_workers=num_workers, multiple_of=4), 5)
    assert [b.tokens[[0, 3]].tolist() for b in batches] == list(islice(sampler, 5))
    assert torch.equal(torch.get_rng_state(), state)


def test_fillers_are_loaded_without_weight():
    (batch,) = load_batches(Numbers(), [[4, FILLER]])
    assert batch.tokens.tolist() == [4, 4, 4, 0, 0, 0]
    assert batch.valid.tolist() == [True] * 3 + [False] * 3
    assert batch.loss_mask.sum() == 3
