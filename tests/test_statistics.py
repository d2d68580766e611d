"""Standard errors against figures worked out by hand."""

import math

import pytest
import torch

from megatron_patch.statistics import mean, or_none, ratio


def test_mean_of_three_right_in_four():
    got = mean(torch.tensor([1.0, 1.0, 1.0, 0.0]))
    # variance (3 * 0.25^2 + 0.75^2) / 3 = 0.25; error 0.5 / sqrt(4)
    assert (got.value, got.stderr) == (0.75, pytest.approx(0.25))


def test_ratio_of_two_documents():
    got = ratio(torch.tensor([2.0, 10.0]), torch.tensor([1.0, 3.0]))
    # 12 / 4 = 3; residuals -1 and 1: deviation sqrt(2); / mean count 2 / sqrt(2) = 0.5
    assert (got.value, got.stderr) == (3.0, pytest.approx(0.5))


def test_equal_scores_have_a_ratio_without_error():
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    got = ratio(scores, scores)  # paired: independent errors would give 0.46
    assert (got.value, got.stderr) == (1.0, 0.0)


def test_documents_not_tokens_are_the_draws():
    """Ten tokens of one document say no more than one: copying every token tenfold must not shrink the error."""
    sums, counts = torch.tensor([2.0, 4.0, 9.0]), torch.tensor([1.0, 2.0, 3.0])
    assert ratio(10 * sums, 10 * counts).stderr == pytest.approx(ratio(sums, counts).stderr)


def test_one_row_has_no_error():
    assert math.isnan(mean(torch.tensor([1.0])).stderr)
    assert (or_none(math.nan), or_none(0.5)) == (None, 0.5)
