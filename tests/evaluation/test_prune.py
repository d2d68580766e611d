"""Pruned models beside their bases: written, masked by a plan, or served, on either side."""

import json
import shutil

import pytest

from megatron_patch import cli
from megatron_patch.errors import UserError
from megatron_patch.evaluation.evaluate import run
from megatron_patch.io.hashes import directory_identity, file_sha256
from megatron_patch.pruning import apply, plan
from megatron_patch.pruning.wish import Wish
from tests.evaluation.completions_server import Served, serve
from tests.evaluation.models import edit_json, written_answers
from tests.pruning import checkpoints
from tests.tiny import make_tiny_base, make_tiny_tokenizer

FIGURES = ("name", "n", "base", "model", "stderr", "ratio", "counted", "gain_over_base")


def prune(folder, base, wish):
    """(plan, pruned model) of a base."""
    stats = checkpoints.make_statistics(base, folder / "stats.safetensors", seed=3)
    plan.run(base, wish, stats=stats, output=folder / "plan.json")
    apply.run(base, folder / "plan.json", folder / "pruned", progress=False)
    return folder / "plan.json", folder / "pruned"


def evaluated(output, base, suite, **options):
    assert run(base, options.pop("model", None), suite, output, device="cpu", kind="prune", **options) == 0
    return json.loads((output / "recovery.json").read_text())


@pytest.fixture(scope="module")
def pruned(talking, tmp_path_factory):
    """(base, plan, pruned model, suite in which both are right in some rows); the base is an upcycled export, whose DSA
    layers have experts too.
    """
    _, base, suite = talking
    folder = tmp_path_factory.mktemp("pruned")
    file, model = prune(folder, base, Wish(keep=4))
    suite = shutil.copytree(suite, folder / "suite")
    for name in ("echo", "owner"):
        rows = [json.loads(line) for line in (suite / f"{name}.jsonl").read_text().splitlines()]
        said = written_answers(model, [row["messages"][0]["content"] for row in rows])
        for row in rows:
            if row["messages"][0]["content"] not in said:  # it may say more spaces, which are not compared of a served model
                row["answer"] = "12121"
        (suite / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return base, file, model, suite


@pytest.fixture(scope="module")
def of_files(pruned, tmp_path_factory):
    """recovery.json of the written checkpoint."""
    base, _, model, suite = pruned
    return evaluated(tmp_path_factory.mktemp("files") / "out", base, suite, model=model)


def assert_same_figures(got, expected):
    for ours, theirs in zip(got["tasks"], expected["tasks"], strict=True):
        assert {key: ours[key] for key in FIGURES} == {key: theirs[key] for key in FIGURES}
    for key in ("loss", "loss_stderr"):
        assert got["perplexity"][key] == pytest.approx(expected["perplexity"][key], abs=1e-5)
    assert got["perplexity"]["loss_difference"] == pytest.approx(expected["perplexity"]["loss_difference"], abs=1e-5)
    assert got["summary"] == expected["summary"]


def test_a_plans_dry_run_scores_what_the_written_checkpoint_scores(pruned, of_files, tmp_path):
    base, file, _, suite = pruned
    before = {path: path.stat().st_mtime_ns for path in base.rglob("*")}
    got = evaluated(tmp_path / "out", base, suite, plan=file)
    assert_same_figures(got, of_files)
    assert any(task["base"] != task["model"] and task["base"] > 0 for task in got["tasks"]), "pruning must matter here"
    assert got["base"] == {"path": str(base), "sha256": directory_identity(base)}
    assert got["model"] == {"path": str(file), "sha256": file_sha256(file), "masked_base": True}
    assert got["kind"] == "prune" and got["participation"] is None and got["warnings"] == []
    page = (tmp_path / "out" / "recovery.md").read_text()
    assert "the base masked by this plan, nothing was written; sha256" in page and "(it cannot mask one)" in page
    assert len(got["lm_eval"]["commands"]) == 1
    assert before == {path: path.stat().st_mtime_ns for path in base.rglob("*")}


@pytest.mark.parametrize(
    ("model_type", "wish"),
    [
        *((family, Wish(keep=8)) for family in checkpoints.FAMILIES),
        ("deepseek_v3", Wish(keep=7, groups="flatten", routed_scaling_factor=2.0)),
    ],
)
def test_every_family(tmp_path, suite, model_type, wish):
    """Groups, MTP layers that nobody loads, hash tables; written and masked."""
    indexer = {} if model_type in ("deepseek_v2", "deepseek_v3") else {"index_topk": 64}
    base = checkpoints.make(tmp_path / "base", model_type, vocab_size=320, **indexer)
    make_tiny_tokenizer(base)
    file, model = prune(tmp_path, base, wish)
    written = evaluated(tmp_path / "written", base, suite, model=model)
    masked = evaluated(tmp_path / "masked", base, suite, plan=file)
    assert_same_figures(masked, written)
    assert abs(written["perplexity"]["loss_difference"]) > 1e-3, "pruning must matter here"


def test_a_served_pruned_model(pruned, of_files, tmp_path):
    base, _, model, suite = pruned
    with serve(Served(model)) as url:
        got = evaluated(tmp_path / "out", base, suite, endpoint=url)
    assert_same_figures(got, of_files)
    assert got["model"] == {"path": f"{url}/v1/completions", "sha256": None, "served_name": "proxy"}
    assert got["summary"]["not_measured"] == []


def without_weights(path, base):
    """Config and tokenizer of a base whose weights lie elsewhere."""
    return shutil.copytree(base, path, ignore=shutil.ignore_patterns("*.safetensors*"))


def test_base_and_model_both_served(pruned, of_files, tmp_path):
    """Neither needs to fit here: --base holds config and tokenizer alone."""
    base, _, model, suite = pruned
    light = without_weights(tmp_path / "light", base)
    whole, small = Served(base, name="whole"), Served(model, name="small")
    argv = ["evaluate", "--kind", "prune", "--base", light, "--suite", suite, "--output", tmp_path / "out", "--device", "cpu"]
    with serve(whole) as first, serve(small) as second:
        served = ["--base-endpoint", first, "--base-endpoint-model", "whole", "--endpoint", second, "--endpoint-model", "small"]
        assert cli.dispatch([str(word) for word in [*argv, *served]]) == 0
    got = json.loads((tmp_path / "out" / "recovery.json").read_text())
    assert_same_figures(got, of_files)
    assert got["base"] == {
        "path": f"{first}/v1/completions", "sha256": None, "served_name": "whole", "directory": str(light)
    }  # fmt: skip
    assert got["model"]["served_name"] == "small" and len(got["lm_eval"]["commands"]) == 4
    assert all(str(light) in command for command in got["lm_eval"]["commands"])
    assert "served as whole" in (tmp_path / "out" / "recovery.md").read_text()
    assert len(whole.requests) == len(small.requests)


def test_a_served_base_without_echo_beside_a_directory(pruned, of_files, tmp_path, capsys):
    base, _, model, suite = pruned
    with serve(Served(base, gives_logprobs=False)) as url:
        got = evaluated(tmp_path / "out", without_weights(tmp_path / "light", base), suite, model=model, base_endpoint=url)
    for ours, theirs in zip(got["tasks"], of_files["tasks"], strict=True):
        assert {key: ours[key] for key in FIGURES} == {key: theirs[key] for key in FIGURES}
    assert got["perplexity"]["base"] is None and got["perplexity"]["model"] == of_files["perplexity"]["model"]
    assert got["warnings"] == [
        "the endpoint of the base gives no log-probabilities of a prompt (echo with logprobs): its perplexity is not measured."
    ]
    assert "base not measured, model" in capsys.readouterr().out


def test_a_plan_of_another_base_is_refused(pruned, tmp_path):
    """By its index, as `apply` does; before anything is loaded or written."""
    _, file, _, suite = pruned
    other = make_tiny_base(tmp_path / "other", num_hidden_layers=4)
    make_tiny_tokenizer(other)
    with pytest.raises(UserError, match="--plan must be for this model"):
        run(other, None, suite, tmp_path / "out", plan=file, kind="prune")
    broken = tmp_path / "plan.json"
    shutil.copy(file, broken)
    edit_json(broken, layers=...)
    with pytest.raises(UserError, match="--plan must be a file of `prune plan`"):
        run(pruned[0], None, suite, tmp_path / "out", plan=broken, kind="prune")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "p", "kind": "upcycle"}, "--plan is for --kind prune: p with --kind upcycle"),
        ({"plan": "p", "model": "m"}, "exactly one of --model, --endpoint, --plan: --model and --plan given"),
        ({"plan": "p", "endpoint": "http://h"}, "--endpoint and --plan given"),
        ({"plan": "p", "base_endpoint": "http://h"}, "--plan masks a base that is loaded here: it cannot mask http://h"),
        ({"plan": "no/such.json"}, "--plan must be a file of `prune plan`: no/such.json does not exist"),
        ({"model": "m", "base_endpoint_model": "x"}, "--base-endpoint-model names what --base-endpoint serves: 'x'"),
        ({"model": "m", "base_endpoint": "http://h", "kind": "upcycle"}, "--base-endpoint is for --kind prune"),
    ],
)
def test_flags_that_contradict_each_other(pruned, tmp_path, options, message):
    base, _, _, suite = pruned
    with pytest.raises(UserError, match=message):
        run(**{"base": base, "model": None, "suite": suite, "output": tmp_path / "out", "kind": "prune"} | options)


def test_a_family_that_pruning_does_not_know(pruned, tmp_path):
    base, _, model, suite = pruned
    other = shutil.copytree(base, tmp_path / "other")
    edit_json(other / "config.json", model_type="deepseek_v41")
    with pytest.raises(UserError, match="'deepseek_v41' is not supported; known are deepseek_v2"):
        run(other, model, suite, tmp_path / "out", kind="prune")
