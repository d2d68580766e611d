"""Scores and choices: deterministic, the lower id wins ties, groups keep the same number each."""

import math

import pytest
import torch

from megatron_patch.errors import UserError
from megatron_patch.pruning import criteria, wish
from megatron_patch.pruning.statistics import SourceStatistics


def stats(count, gate=None, norm=None) -> SourceStatistics:
    count = torch.tensor([count])
    nothing = torch.full(count.shape, math.nan, dtype=torch.float64)
    gate = nothing if gate is None else torch.tensor([gate], dtype=torch.float64)
    norm = nothing if norm is None else torch.tensor([norm], dtype=torch.float64)
    return SourceStatistics(10, count, gate, norm, norm, norm)


def test_criteria_differ_where_they_should():
    seen = stats([10, 1, 5, 0], gate=[1.0, 2.0, 3.0, 0.0], norm=[1.0, 9.0, 2.0, 0.0])
    assert criteria.scores(seen, "frequency")[0].tolist() == [10, 1, 5, 0]
    assert criteria.scores(seen, "gate_sum")[0].tolist() == [1, 2, 3, 0]
    assert criteria.scores(seen, "reap")[0].tolist() == [0.1, 9.0, 0.4, 0.0]  # a mean: rare and strong wins


@pytest.mark.parametrize("criterion", ["gate_sum", "reap"])
def test_recorded_ids_serve_frequency_alone(criterion):
    counted = stats([3, 2, 1, 0])
    assert criteria.scores(counted, "frequency")[0].tolist() == [3, 2, 1, 0]
    with pytest.raises(UserError, match=f"--criterion {criterion} needs routing weights"):
        criteria.scores(counted, criterion)


def test_ties_go_to_the_lower_id():
    assert criteria.select(torch.tensor([1.0, 2.0, 2.0, 2.0, 1.0]), 2) == [1, 2]
    assert criteria.select(torch.zeros(8), 3) == [0, 1, 2]


def test_groups_keep_the_same_number_ascending():
    score = torch.tensor([9.0, 8, 7, 6, 0, 1, 2, 3])
    assert criteria.select(score, 4, n_group=2) == [0, 1, 6, 7]
    assert criteria.select(score, 4) == [0, 1, 2, 3]


def test_protected_experts_stay():
    score = torch.tensor([9.0, 8, 7, 6, 0, 1, 2, 3])
    assert criteria.select(score, 4, n_group=2, protected={3, 4}) == [0, 3, 4, 7]


@pytest.mark.parametrize(
    "entries, expected",
    [(["3:1,2", "all:5"], {3: {1, 2, 5}, 4: {5}}), ([], {}), (["4:0"], {4: {0}})],
)
def test_protect_lists(entries, expected):
    assert wish.parse_protected(entries, (3, 4)) == expected


@pytest.mark.parametrize(
    "entry, word", [("3", "LAYER:ID"), ("x:1", "LAYER:ID"), ("3:a", "LAYER:ID"), ("7:1", "layer 7 is none")]
)
def test_malformed_protect_lists(entry, word):
    with pytest.raises(UserError, match=word):
        wish.parse_protected([entry], (3, 4))


def test_source_weights():
    assert wish.parse_weights([]) is None
    assert wish.parse_weights(["code=2", "a=b=0.5"]) == {"code": 2.0, "a=b": 0.5}
    for entry in ("code", "code=x", "=1"):
        with pytest.raises(UserError, match="SOURCE=WEIGHT"):
            wish.parse_weights([entry])
