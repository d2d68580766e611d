"""Which tasks count, what a ratio is, and when a proxy passes."""

import math

import pytest
import torch

from megatron_patch.evaluation.recovery import (
    DocumentScores,
    TaskScores,
    bypassed_is_base,
    fraction_longer,
    participation_entry,
    perplexity_entry,
    summary_entry,
    task_entry,
)
from megatron_patch.evaluation.suite import Row, Task


def _scores(base, model, chance=0.1, **ablated):
    """Scores of 100 rows (or of the list given) from numbers of right answers."""
    rows = [value if isinstance(value, list) else [1] * value + [0] * (100 - value) for value in (base, model)]
    n = len(rows[0])
    task = Task("t", "exact_match", chance, True, "d", [Row([], "a", "f:1")] * n)
    of_model = {"model": torch.tensor(rows[1]).double()}
    of_model |= {name: torch.tensor([1] * k + [0] * (n - k)).double() for name, k in ablated.items()}
    return TaskScores(task, torch.tensor(rows[0]).double(), of_model, 1.0)


@pytest.mark.parametrize(
    ("base", "model", "chance", "counted", "ratio"),
    [
        (80, 76, 0.1, True, 0.95),
        (80, 88, 0.1, True, 1.1),
        (100, 50, 0.5, True, 0.5),  # no error: above chance
        (50, 50, 0.5, False, None),  # at chance
        (55, 55, 0.5, False, None),  # 0.05 above, the error is 0.05
        (61, 61, 0.5, True, 1.0),  # 0.11 above, twice the error is 0.098
        (59, 59, 0.5, False, None),  # 0.09 above, twice the error is 0.099
        (0, 100, 0.0, False, None),  # no division by zero
        (1, 1, 0.0, False, None),
        (5, 5, 0.0, True, 1.0),
        ([1], [1], 0.1, False, None),  # one row has no error
    ],
)
def test_counted_needs_two_standard_errors_above_chance(base, model, chance, counted, ratio):
    entry = task_entry(_scores(base, model, chance))
    assert (entry["counted"], entry["ratio"]) == (counted, pytest.approx(ratio) if ratio is not None else None)


def test_errors_are_of_base_and_model_in_this_order():
    entry = task_entry(_scores(80, 50))
    # sqrt(p (1 - p) / (n - 1))
    assert entry["stderr"] == [pytest.approx(math.sqrt(0.16 / 99)), pytest.approx(math.sqrt(0.25 / 99))]
    assert task_entry(_scores([1], [0]))["stderr"] == [None, None]


def test_gain_and_what_scrambling_takes_of_it():
    entry = task_entry(_scores(10, 90, bypassed=10, scrambled=30))
    assert (entry["bypassed"], entry["scrambled_indices"]) == (0.1, 0.3)
    assert entry["gain_over_base"] == pytest.approx(0.8)
    assert entry["gain_lost_by_scrambling"] == pytest.approx(0.75)
    # paired: 80 rows better, 20 equal
    assert entry["gain_stderr"] == pytest.approx(math.sqrt(0.16 / 99))
    assert task_entry(_scores(90, 90, bypassed=90, scrambled=10))["gain_lost_by_scrambling"] is None


def test_without_dsa_layers_there_are_no_ablations():
    entry = task_entry(_scores(80, 80))
    assert entry["bypassed"] is None and entry["scrambled_indices"] is None


def _documents():
    tokens = torch.tensor([10.0, 30.0])
    base = DocumentScores({"model": torch.tensor([20.0, 60.0])}, {}, tokens, {"model": math.exp(2.0)})
    nll = {
        "model": torch.tensor([15.0, 45.0]),
        "bypassed": torch.tensor([20.0, 63.0]),
        "scrambled": torch.tensor([18.0, 54.0]),
    }
    kl = {"bypassed": [2.0, 6.0], "scrambled": [1.0, 3.0], "bypassed 4": [0.4, 1.2], "bypassed 3": [0.8, 2.4]}
    perplexity = {name: float(torch.exp(values.sum() / tokens.sum())) for name, values in nll.items()}
    return base, DocumentScores(nll, {name: torch.tensor(values) for name, values in kl.items()}, tokens, perplexity)


def test_perplexity_and_participation_are_means_over_tokens():
    base, model = _documents()
    entry = perplexity_entry(base, model, base.tokens)
    assert entry["base"] == pytest.approx(math.exp(2.0)) and entry["model"] == pytest.approx(math.exp(1.5))
    assert entry["loss_difference"] == pytest.approx(-0.5)
    assert entry["loss_difference_stderr"] == pytest.approx(0.0)  # the same in both documents
    assert (entry["documents"], entry["tokens"]) == (2, 40)
    part = participation_entry(model, (3, 4), 0.5)
    assert part["kl_nats"] == pytest.approx(0.2) and part["scrambled_kl_nats"] == pytest.approx(0.1)
    assert part["per_layer"] == [pytest.approx(0.08), pytest.approx(0.04)]  # in the order of `layers`
    assert part["tokens"] == 40


def test_perplexity_that_was_not_measured_is_null():
    base, model = _documents()
    entry = perplexity_entry(base, None, base.tokens)
    assert entry["base"] == pytest.approx(math.exp(2.0)) and entry["loss"][0] == pytest.approx(2.0)
    for key in ("model", "loss_difference", "loss_difference_stderr", "bypassed", "scrambled_indices"):
        assert entry[key] is None
    assert [entry[key][1] for key in ("stderr", "loss", "loss_stderr")] == [None, None, None]
    entry = perplexity_entry(None, model, base.tokens)
    assert entry["model"] == pytest.approx(math.exp(1.5)) and entry["loss"] == [None, pytest.approx(1.5)]
    assert entry["base"] is None and entry["loss_difference"] is None and entry["tokens"] == 40


def test_a_base_part_that_is_not_the_base_shows():
    assert bypassed_is_base(*_documents()) == pytest.approx(0.1)  # second document: 3 nats over 30 tokens


def test_fraction_longer_is_strict():
    assert fraction_longer([7, 8, 9, 10], 8) == 0.5


@pytest.mark.parametrize(
    ("ratios", "kl", "verdict", "reason"),
    [
        ([0.95, 0.8], 0.5, "pass", None),
        ([0.95, None], 0.01, "pass", None),
        ([0.95, 0.79], 0.5, "fail", "t1: the model has 0.790 of the base's score"),
        ([None, None], 0.5, "fail", "no task is counted"),
        ([1.0, 1.0], 0.0, "fail", "the DSA layers take no part"),
        ([0.9], None, "pass", None),  # pruned: nothing to take part
    ],
)
def test_verdict(ratios, kl, verdict, reason):
    tasks = [{"name": f"t{i}", "ratio": value, "counted": value is not None} for i, value in enumerate(ratios)]
    summary = summary_entry(tasks, None if kl is None else {"kl_nats": kl})
    assert summary["verdict"] == verdict
    assert any(reason in text for text in summary["reasons"]) if reason else summary["reasons"] == []
    assert summary["not_measured"] == []
    assert summary_entry(tasks, None, ("participation",))["not_measured"] == ["participation"]
    counted = [value for value in ratios if value is not None]
    assert summary["min_ratio"] == (min(counted) if counted else None)
    assert summary["mean_ratio"] == (pytest.approx(sum(counted) / len(counted)) if counted else None)
