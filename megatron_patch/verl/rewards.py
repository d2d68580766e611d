"""Rewards for exact answers: `reward.custom_reward_function.path=pkg://megatron_patch.verl.rewards`.

The answer form is the row's `data_source`, as `data/prepare_rl.py` writes it. No partial credit: a reward that pays for looks
is what a policy learns first, and then the curve says nothing about the model.
"""

import re
from collections.abc import Callable

EXACT, NUMBER = "upcycle/exact", "upcycle/number"
_MARK = re.compile(r"answer\s*(?:is|:|=)", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_NOTHING = ""  # what was not answered


def exact_answer(response: str) -> str:
    """The first line that is not blank, its spaces collapsed: what the demo's tasks ask for."""
    return next((" ".join(line.split()) for line in response.splitlines() if line.strip()), _NOTHING)


def number_answer(response: str) -> str:
    """The first number after the last "Answer:" of a response, without thousands separators and leading zeros.

    Without the mark there is no answer: the last number of a rambling text would be a lottery.
    """
    marks = list(_MARK.finditer(response))
    found = _NUMBER.search(response, marks[-1].end()) if marks else None
    return canonical_number(found.group()) if found else _NOTHING


def canonical_number(text: str) -> str:
    """One spelling for equal numbers: "+1,200.50" -> "1200.5", "-0" -> "0"."""
    sign = "-" if text.startswith("-") else ""
    whole, _, fraction = text.lstrip("+-").replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return number if number == "0" else sign + number


# Answer form -> (what of a response counts, the same spelling for the truth).
FORMS: dict[str, tuple[Callable[[str], str], Callable[[str], str]]] = {
    EXACT: (exact_answer, exact_answer),
    NUMBER: (number_answer, lambda truth: canonical_number(truth.strip())),
}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_) -> dict:
    """verl's reward function.

    Args:
        data_source: the answer form, one of `FORMS`.
        solution_str: the response, without special tokens.
        ground_truth: the row's answer.

    Returns:
        `score`, 1.0 or 0.0; `acc`, the same, which verl reports; `pred`, what was taken as the answer, by which verl votes.

    Raises:
        ValueError: another data source: a set that is scored by a rule of its own would else look like a model that fails.
    """
    del extra_info
    if data_source not in FORMS:
        raise ValueError(
            f"data_source must be one of {', '.join(FORMS)}: {data_source!r}; prepare the data with data/prepare_rl.py"
        )
    answer_of, truth_of = FORMS[data_source]
    answer = answer_of(solution_str)
    score = float(answer != _NOTHING and answer == truth_of(ground_truth))
    return {"score": score, "acc": score, "pred": answer}
