"""The whole command on a tiny base: files, schema, warnings, refusals."""

import json
import shutil
import subprocess
import sys

import pytest

from megatron_patch.errors import UserError
from megatron_patch.evaluation.evaluate import run
from megatron_patch.io.hashes import directory_identity
from tests.evaluation.models import edit_json, edit_tensors
from tests.tiny import make_tiny_base

TASK_KEYS = {
    "name",
    "metric",
    "n",
    "chance",
    "base",
    "model",
    "stderr",
    "ratio",
    "counted",
    "bypassed",
    "scrambled_indices",
}


def _evaluate(base, model, suite, output, **options):
    assert run(base, model, suite, output, device="cpu", **options) == 0
    return json.loads((output / "recovery.json").read_text())


@pytest.fixture(scope="module")
def of_export(tiny_base, export, suite, tmp_path_factory):
    output = tmp_path_factory.mktemp("evaluation") / "out"
    return output, _evaluate(tiny_base, export, suite, output)


def test_recovery_json_has_the_published_form(of_export, tiny_base, export):
    output, got = of_export
    assert sorted(file.name for file in output.iterdir()) == [
        "lm_eval",
        "recovery.json",
        "recovery.md",
        "recovery.png",
    ]
    assert (got["schema"], got["kind"]) == (1, "upcycle")
    assert got["base"] == {"path": str(tiny_base), "sha256": directory_identity(tiny_base)}
    assert got["model"] == {"path": str(export), "sha256": directory_identity(export)}
    assert [task["name"] for task in got["tasks"]] == ["echo", "owner"]
    for task in got["tasks"]:
        assert task.keys() >= TASK_KEYS and task["n"] == 6 and task["rows_beyond_topk"] == 1.0
    assert got["perplexity"].keys() >= {"base", "model"}
    assert got["participation"].keys() >= {"kl_nats", "per_layer", "tokens"}
    assert len(got["participation"]["per_layer"]) == 2
    assert got["summary"].keys() >= {"min_ratio", "mean_ratio", "threshold", "verdict"}
    assert (output / "recovery.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_that_differs_takes_part(of_export):
    _, got = of_export
    assert got["participation"]["kl_nats"] > 0.01
    assert got["perplexity"]["model"] != got["perplexity"]["base"]
    assert got["perplexity"]["bypassed"] == pytest.approx(got["perplexity"]["base"], rel=1e-6)
    assert got["warnings"] == []


def test_the_page_and_the_console_say_what_the_json_says(of_export, tiny_base, export, suite, tmp_path, capsys):
    output, got = of_export
    page = (output / "recovery.md").read_text()
    assert f"tokens: base {got['perplexity']['base']:.3f}, model {got['perplexity']['model']:.3f}. Loss, model minus base" in page
    assert "| echo | 6 | 0.100 |" in page and "no task is counted" in page
    _evaluate(tiny_base, export, suite, tmp_path / "out", limit=2)
    said = capsys.readouterr().out
    assert "echo" in said and "Verdict: fail" in said and "only the first 2 rows" in said


def test_a_model_that_is_its_base_passes_nothing(tiny_base, zeroed_export, suite, tmp_path):
    got = _evaluate(tiny_base, zeroed_export, suite, tmp_path / "out")
    assert got["participation"]["kl_nats"] == 0.0 and got["participation"]["per_layer"] == [0.0, 0.0]
    assert got["perplexity"]["model"] == got["perplexity"]["base"]
    assert any("take no part" in reason for reason in got["summary"]["reasons"])


def test_the_same_run_gives_the_same_scores(of_export, tiny_base, export, suite, tmp_path):
    again = _evaluate(tiny_base, export, suite, tmp_path / "out")
    first = of_export[1]
    own = {"settings": None, "lm_eval": None}  # seconds; the output's name in a command
    assert again | own == first | own


def test_prune_has_no_ablations(tiny_base, suite, tmp_path):
    pruned = make_tiny_base(tmp_path / "pruned", n_routed_experts=4, seed=5)
    for file in tiny_base.glob("*token*"):
        shutil.copy(file, pruned)
    shutil.copy(tiny_base / "chat_template.jinja", pruned)
    got = _evaluate(tiny_base, pruned, suite, tmp_path / "out", kind="prune")
    assert got["kind"] == "prune" and got["participation"] is None
    assert all(task["bypassed"] is None and task["scrambled_indices"] is None for task in got["tasks"])
    assert "bypassed*" not in (tmp_path / "out" / "recovery.md").read_text()


def test_a_pruned_export_is_scored_against_the_export(export, suite, tmp_path):
    """Both have DSA layers: what pruning changed is asked, not what the layers add."""
    got = _evaluate(export, export, suite, tmp_path / "out", kind="prune")
    assert got["kind"] == "prune" and got["participation"] is None and got["warnings"] == []
    assert got["perplexity"]["loss_difference"] == 0.0 and got["perplexity"]["bypassed"] is None


def test_warns_of_another_base(export, suite, tiny_base, tmp_path):
    """Scores against a base that the model was not made from look like any others."""
    model = shutil.copytree(export, tmp_path / "model")
    (model / "upcycle_manifest.json").write_text(json.dumps({"base": {"path": "elsewhere", "sha256": "0" * 64}}))

    def change(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1.01

    index = json.loads((model / "model.safetensors.index.json").read_text())
    edit_tensors(model, index["weight_map"]["lm_head.weight"], change)
    warnings = " ".join(_evaluate(tiny_base, model, suite, tmp_path / "out")["warnings"])
    assert "names another base (sha256 000000" in warnings
    assert "with its DSA layers bypassed the model should be its base" in warnings


def test_warns_when_no_row_reaches_topk(export, suite, tiny_base, tmp_path):
    model = shutil.copytree(export, tmp_path / "model")
    edit_json(model / "config.json", dsa_index_topk=2048)
    got = _evaluate(tiny_base, model, suite, tmp_path / "out")
    assert "no row of any task is longer than top-k (2048)" in got["warnings"][0]
    assert got["participation"]["scrambled_kl_nats"] == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "merge"}, "--kind must be upcycle or prune: 'merge'"),
        ({"kind": "prune"}, r"a pruned model has the DSA layers of its base: .* has \[\], .* has \[3, 4\]"),
        ({"dtype": "float16"}, "--dtype must be float32 or bfloat16"),
        ({"batch_size": 0}, "--batch-size must be 1 or more: 0"),
        ({"device": "npu"}, "--device npu needs torch_npu"),
        ({"device": "xpu"}, "--device must be cpu, cuda or npu"),
        ({"limit": 0}, "--limit must be 1 or more"),
        ({"endpoint": "http://localhost:1"}, "exactly one of --model, --endpoint, --plan: --model and --endpoint given"),
        ({"model": None}, "exactly one of --model, --endpoint, --plan: none given"),
        ({"endpoint_model": "x"}, "--endpoint-model names what --endpoint serves: 'x' without one"),
    ],
)
def test_refuses_settings(tiny_base, export, suite, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        run(**{"base": tiny_base, "model": export, "suite": suite, "output": tmp_path / "out"} | options)
    assert not (tmp_path / "out").exists()


def test_refuses_models_in_the_wrong_place(tiny_base, export, suite, tmp_path):
    with pytest.raises(UserError, match="--base must be a base without DSA layers"):
        run(export, export, suite, tmp_path / "out")
    with pytest.raises(UserError, match="--kind upcycle needs a --model with DSA layers"):
        run(tiny_base, tiny_base, suite, tmp_path / "out")


def test_refuses_an_output_that_holds_something(tiny_base, export, suite, tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(UserError, match="--output must be a new or empty directory"):
        run(tiny_base, export, suite, tmp_path)
    assert (tmp_path / "kept").read_text() == "mine"


def test_refuses_a_tokenizer_beyond_the_vocabulary(export, suite, tiny_base, tmp_path):
    """An embedding look-up beyond the table ends in a bare IndexError, or reads other memory on a GPU."""
    small = make_tiny_base(tmp_path / "small", vocab_size=100)
    for file in [*tiny_base.glob("*token*"), tiny_base / "chat_template.jinja"]:
        shutil.copy(file, small)
    with pytest.raises(UserError, match=r"token ids must be below vocab_size: the suite has id \d+, .* has 100 rows"):
        run(small, export, suite, tmp_path / "out")


def test_refuses_rows_beyond_the_models_positions(export, suite, tiny_base, tmp_path):
    """lm-eval would cut the prompt from the left."""
    short = shutil.copytree(tiny_base, tmp_path / "short")
    edit_json(short / "config.json", max_position_embeddings=40)
    with pytest.raises(UserError, match=r"rows must fit into max_position_embeddings.* 48 tokens, .* takes 40"):
        run(short, export, suite, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_tasks_hold_the_rows_that_were_scored(tiny_base, export, suite, tmp_path):
    _evaluate(tiny_base, export, suite, tmp_path / "out", limit=2)
    files = sorted(file.name for file in (tmp_path / "out" / "lm_eval").iterdir())
    assert "tiny_heldout.yaml" in files and "__pycache__" not in files
    for name in ("tiny_echo", "tiny_owner", "tiny_heldout"):
        assert len((tmp_path / "out" / "lm_eval" / f"{name}.jsonl").read_text().splitlines()) == 2


def test_needs_no_megatron():
    """Scoring must run where only torch and transformers are, such as verl's environment."""
    code = "import sys, megatron_patch.evaluation.evaluate; print([m for m in sys.modules if m.split('.')[0] == 'megatron'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
