"""Planted symptoms are found, healthy curves give none: each over many seeds."""

import math

import numpy as np
import pytest

from megatron_patch.diagnosis.rl_curves import autocorrelation, median_error, noise, turning_points
from megatron_patch.diagnosis.rl_symptoms import DETECTORS, MISMATCH, examine, title
from tests.diagnosis.verl_logs import FAULTS, healthy, ill

HEALTHY_SEEDS, ILL_SEEDS = 200, 50


def test_healthy_runs_have_no_symptom() -> None:
    for seed in range(HEALTHY_SEEDS):
        found, not_tested = examine(healthy(seed))
        assert not found, (seed, found)
        assert not not_tested, (seed, not_tested)


def test_healthy_runs_of_old_releases_have_no_symptom() -> None:
    """Three decimals: many steps are equal, and small metrics have one digit."""
    for seed in range(HEALTHY_SEEDS):
        rows = {step: {name: round(value, 3) for name, value in row.items()}
                for step, row in healthy(seed, old_names=True).items()}  # fmt: skip
        found, _ = examine(rows)
        assert not found, (seed, found)


@pytest.mark.parametrize("n", [1, 3, 10, 25])
def test_short_healthy_runs_have_no_symptom(n: int) -> None:
    for seed in range(HEALTHY_SEEDS):
        found, not_tested = examine(healthy(seed, max(n, 2)))
        assert not found, (seed, found)
        assert "reward_flat" in not_tested and "mismatch" not in not_tested


def test_every_symptom_has_a_planted_fault() -> None:
    assert set(FAULTS) == set(DETECTORS)
    assert all(title(name) for name in DETECTORS)


@pytest.mark.parametrize("fault", list(FAULTS))
def test_planted_symptom_is_found_and_no_other(fault: str) -> None:
    for seed in range(ILL_SEEDS):
        rows = ill(fault, seed)
        found, _ = examine(rows)
        assert list(found) == [fault], (seed, found)
        symptom = found[fault]
        assert symptom.steps and len(symptom.steps) == len(symptom.values)
        assert set(symptom.steps) <= set(rows)


def test_grad_norm_start_names_the_steps() -> None:
    rows = healthy(1, 100)
    for step in (1, 2, 3, 4, 5):
        rows[step]["actor/grad_norm"] = 100.0 * step
    symptom = examine(rows)[0]["grad_norm_start"]
    assert symptom.steps == [1, 2, 3, 4, 5] and symptom.values == [100, 200, 300, 400, 500]
    assert symptom.threshold >= 20


def test_grad_norm_that_fades_is_no_symptom() -> None:
    rows = healthy(1, 100)
    for step in range(1, 101):
        rows[step]["actor/grad_norm"] = 5.0 if step < 20 else 0.01
    assert not examine(rows)[0]


def test_one_step_shows_a_mismatch() -> None:
    """A first step is what one looks at after a change."""
    found, _ = examine({1: {"training/rollout_probs_diff_mean": 2 * MISMATCH}})
    assert found["mismatch"].steps == [1]


def test_mismatch_from_k3_where_probabilities_are_not_compared() -> None:
    rows = healthy(1, 60)
    for step in range(1, 61):
        del rows[step]["training/rollout_probs_diff_mean"]
        rows[step]["rollout_corr/k3_kl"] = 0.03
    assert examine(rows)[0]["mismatch"].metric == "rollout_corr/k3_kl"


def test_mismatch_in_few_of_many_steps() -> None:
    rows = healthy(2, 400)
    for step in (100, 200, 300):
        rows[step]["training/rollout_probs_diff_mean"] = 1.1 * MISMATCH
    assert not examine(rows)[0]
    for step in (100, 200, 300):
        rows[step]["training/rollout_probs_diff_mean"] = 5 * MISMATCH
    assert examine(rows)[0]["mismatch"].steps == [100, 200, 300]


def test_reward_at_its_ceiling_is_not_flat() -> None:
    rows = healthy(2, 100)
    rng = np.random.default_rng(0)
    for step in range(1, 101):
        rows[step]["critic/rewards/mean"] = 0.97 + rng.normal(0, 0.005)
    assert not examine(rows)[0]
    for step in range(1, 101):
        rows[step]["critic/rewards/mean"] -= 0.5
    assert list(examine(rows)[0]) == ["reward_flat"]


def test_validation_and_saving_are_no_slow_steps() -> None:
    rows = healthy(2, 100)
    for step in (20, 40, 60):
        wait = 10 * rows[step]["timing_s/step"]
        rows[step] |= {"timing_s/save_checkpoint": wait, "perf/time_per_step": rows[step]["timing_s/step"] + wait}
    assert not examine(rows)[0]
    for step in (20, 40, 60):
        del rows[step]["timing_s/save_checkpoint"]
    assert examine(rows)[0]["step_time"].steps == [20, 40, 60]


def test_non_finite_names_the_first_metric() -> None:
    rows = healthy(2, 50)
    for step in range(20, 51):
        rows[step]["actor/grad_norm"] = math.nan
    rows[30]["critic/rewards/mean"] = math.inf
    rows[10]["timing_s/gen"] = rows[10]["val-aux/std@1"] = math.nan  # undefined, not ill
    symptom = examine(rows)[0]["non_finite"]
    assert symptom.metric == "actor/grad_norm" and symptom.steps[0] == 20 and "1 other metrics" in symptom.text


def test_what_is_not_logged_is_said() -> None:
    found, not_tested = examine({1: {"actor/lr": 1e-6}})
    assert not found
    assert set(not_tested) == set(DETECTORS) - {"non_finite"}
    assert not_tested["entropy_collapse"] == "not logged: actor/entropy or actor/entropy_loss"
    assert "rollout_corr/k3_kl" in not_tested["mismatch"]


def test_noise_ignores_trends() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(0, 2.0, 4000)
    assert noise(values) == pytest.approx(2.0, rel=0.05)
    assert noise(values + np.linspace(0, 500, 4000)) == pytest.approx(2.0, rel=0.05)


def test_median_error_by_simulation() -> None:
    rng = np.random.default_rng(0)
    medians = np.median(rng.normal(0, 3.0, (4000, 2, 51)), axis=2)
    assert (medians[:, 0] - medians[:, 1]).std() == pytest.approx(median_error(3.0, 51), rel=0.05)


def test_turning_points() -> None:
    wave = np.array([0, 1, 2, 3, 2, 1, 0, 1, 2, 3, 4, 3, 3.5, 3, 0, 5.0])
    assert turning_points(wave, 2.0) == [3, 6, 10, 14]
    assert turning_points(np.arange(10.0), 2.0) == []


def test_autocorrelation_peaks_at_the_period() -> None:
    x = np.arange(200)
    r = autocorrelation(np.sin(2 * np.pi * x / 20) + 0.01 * x, 30)
    assert r[0] == pytest.approx(1) and 19 <= 10 + int(np.argmax(r[10:])) <= 21
    assert not autocorrelation(np.full(50, 0.1), 10).any()
