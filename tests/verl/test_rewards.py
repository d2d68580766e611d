"""Exact answers: what counts, and that nothing else does."""

import pytest

from megatron_patch.verl.rewards import canonical_number, compute_score


@pytest.mark.parametrize(
    "response, truth, score",
    [
        ("Answer: 42", "42", 1), ("17 + 25 is 42.\nANSWER: 42", "42", 1), ("The answer is 42.", "42", 1), ("answer = -7", "-7", 1),
        ("Answer: 1,200", "1200", 1), ("Answer: +042.50", "42.5", 1), ("Answer: -0", "0", 1), ("Answer: 3\nAnswer: 4", "4", 1),
        ("Answer: 3\nAnswer: 4", "3", 0), ("42", "42", 0), ("Answer: none, 42 before", "41", 0), ("", "42", 0),
        ("Answer: 420", "42", 0), ("Answer: 42.0001", "42", 0), ("Answer:", "42", 0), ("Answer: 42 or 43", "43", 0),
    ],
)  # fmt: skip
def test_numbers(response, truth, score):
    assert compute_score("upcycle/number", response, truth)["score"] == score


@pytest.mark.parametrize(
    "response, truth, score",
    [("anvil", "anvil", 1), ("\n  anvil  basket \nmore", "anvil basket", 1), ("an anvil", "anvil", 0), ("Anvil", "anvil", 0), ("", "anvil", 0)],
)  # fmt: skip
def test_words(response, truth, score):
    assert compute_score("upcycle/exact", response, truth)["score"] == score


def test_an_unanswered_question_is_wrong_even_if_the_truth_is_empty():
    assert compute_score("upcycle/exact", "", "")["score"] == 0


def test_verl_gets_a_score_an_accuracy_and_the_answer():
    assert compute_score("upcycle/number", "Answer: 007", "7", {"index": 1}, reward_router_address=None) == {
        "score": 1.0,
        "acc": 1.0,
        "pred": "7",
    }


def test_another_data_source_is_refused():
    with pytest.raises(ValueError, match=r"upcycle/exact, upcycle/number: 'openai/gsm8k'"):
        compute_score("openai/gsm8k", "#### 3", "3")


@pytest.mark.parametrize(
    "text, number", [("0", "0"), ("-0.0", "0"), ("+7", "7"), ("1,000,000", "1000000"), (".5", "0.5")]
)
def test_one_spelling(text, number):
    assert canonical_number(text) == number
