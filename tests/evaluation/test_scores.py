"""lm-eval's scores against independent computations: real greedy decoding, and the loss of one document at a time."""

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_patch.data.tokenizer import load_tokenizer
from megatron_patch.errors import UserError
from megatron_patch.evaluation.encode import encode_documents, encode_rows
from megatron_patch.evaluation.lm_eval_tasks import write_lm_eval_tasks
from megatron_patch.evaluation.loading import inspect_directory, load_model
from megatron_patch.evaluation.scores import (
    require_lm_eval,
    score_documents,
    score_exact,
    score_generated,
    wrap_model,
)
from megatron_patch.evaluation.suite import read_suite
from tests.evaluation.models import written_answers


@pytest.fixture(scope="module", params=["base", "export"])
def scored(request, talking, tmp_path_factory):
    """(directory, model, tokenizer, suite, documents, task files, lm-eval's scores) of either model."""
    directory = talking[0] if request.param == "base" else talking[1]
    suite, tokenizer = read_suite(talking[2]), load_tokenizer(directory)
    tasks = [encode_rows(tokenizer, task.rows) for task in suite.tasks]
    documents = encode_documents(tokenizer, suite.held_out)
    files = write_lm_eval_tasks(tmp_path_factory.mktemp("tasks"), suite, tasks, documents, tokenizer.eos_token)
    model = load_model(inspect_directory(directory))
    lm = wrap_model(model, tokenizer, 5)
    return directory, model, lm, suite, documents, files, score_exact(lm, files, "it")


def test_exact_match_is_what_greedy_decoding_writes(scored):
    directory, _, _, suite, *_, scores = scored
    for task, got in zip(suite.tasks, scores.tasks, strict=True):
        written = written_answers(directory, [row.messages[0]["content"] for row in task.rows])
        expected = [float(written.get(row.messages[0]["content"]) == row.answer) for row in task.rows]
        assert got.tolist() == expected
    assert {0.0, 1.0} <= set(torch.cat(scores.tasks).tolist())


def test_both_forms_of_a_task_agree(scored):
    _, _, lm, *_, files, scores = scored
    generated = score_generated(lm, files)
    assert [task.tolist() for task in generated.tasks] == [task.tolist() for task in scores.tasks]
    assert generated.log_likelihood is None


def test_loss_equals_one_document_at_a_time(scored):
    _, model, lm, _, documents, files, scores = scored
    losses = []
    for document in documents:
        ids = torch.tensor([document.ids])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits.double()
        losses.append(float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")))
    expected = torch.tensor(losses, dtype=torch.float64)
    torch.testing.assert_close(-scores.log_likelihood, expected, rtol=1e-5, atol=0)  # fp32 sums in another order
    tokens = sum(len(document.ids) - 1 for document in documents)
    assert scores.perplexity == pytest.approx(float(torch.exp(expected.sum() / tokens)), rel=1e-5)
    alone = score_documents(lm, files)
    assert alone.perplexity == pytest.approx(scores.perplexity, rel=1e-6)  # other batches


def test_refuses_logits_that_are_not_finite(scored):
    """arg-max over NaN would score as a wrong answer, in silence."""
    _, model, lm, *_, files, _ = scored
    weight = model.model.norm.weight
    before = weight.data.clone()
    try:
        weight.data[0] = float("nan")
        with pytest.raises(UserError, match="logits must be finite: the base gives 66 of 66 log-likelihoods"):
            score_exact(lm, files, "the base")
    finally:
        weight.data.copy_(before)
    assert not model._forward_hooks


@pytest.mark.slow  # it reads every task file that lm-eval brings
@pytest.mark.parametrize("number", [0, 1], ids=["base", "export"])
def test_lm_evals_command_line_gives_the_same_figures(talking_evaluation, talking, tmp_path, number):
    """To the last digit, by the command that the report prints, without a network and from another directory."""
    report = json.loads((talking_evaluation / "recovery.json").read_text())
    assignment, program, *words = shlex.split(report["lm_eval"]["commands"][number])
    assert (assignment, program) == ("HF_HUB_OFFLINE=1", "lm_eval")
    arguments = [sys.executable, "-m", "lm_eval", *words, "--output_path", "results"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = Path(tmp_path / "results").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    which = ("base", "model")[number]
    for task in report["tasks"]:
        assert results[f"tiny_{task['name']}"]["exact_match,none"] == task[which]
        assert results[f"tiny_{task['name']}"]["exact_match_stderr,none"] == pytest.approx(task["stderr"][number])
    assert results["tiny_heldout"]["token_perplexity,none"] == report["perplexity"][which]
    assert 0 < report["tasks"][0][which] < 1


@pytest.mark.parametrize("name", ["lm_eval", "tenacity"])
def test_a_missing_package_is_named(monkeypatch, name):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == name else found(asked))
    with pytest.raises(
        UserError, match=f"evaluate scores through lm-eval: {name} is not installed; pip install lm_eval"
    ):
        require_lm_eval()
