"""plan.json: exactly the documented keys, sizes that apply keeps, and figures that follow from the statistics."""

import json

import pytest

from megatron_patch.errors import UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.pruning import plan
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.statistics import Statistics, model_sha256
from megatron_patch.pruning.wish import Wish
from tests.pruning import checkpoints

KEYS = [
    "schema", "model_type", "source_index_sha256", "stats_sha256", "criterion", "keep", "layers", "groups", "mtp",
    "config_changes", "tid2eid", "bytes", "warnings",
]  # fmt: skip


def test_the_documented_format(pruned):
    content = json.loads(pruned.plan.read_text())
    assert list(content) == KEYS and content["schema"] == 1
    assert content["source_index_sha256"] == model_sha256(pruned.model)
    assert content["stats_sha256"] == file_sha256(pruned.stats)
    for layer in content["layers"].values():
        assert list(layer) == ["kept", "old_to_new", "coverage", "never_routed"]
        assert layer["old_to_new"] == {str(old): new for new, old in enumerate(layer["kept"])}
    assert content["config_changes"]["n_routed_experts"] == [checkpoints.EXPERTS, 8]
    assert all(set(warning) == {"code", "text"} for warning in content["warnings"])
    before, after = MoeCheckpoint(pruned.model).nbytes, MoeCheckpoint(pruned.output).nbytes
    assert content["bytes"] == {"before": before, "after": after}


def test_coverage_and_never_routed(pruned):
    content, seen = json.loads(pruned.plan.read_text()), Statistics.load(pruned.stats)
    count = seen.combined().count
    for row, number in enumerate(seen.layers):
        layer = content["layers"][str(number)]
        assert layer["coverage"] == pytest.approx(float(count[row][layer["kept"]].sum() / count[row].sum()))
        assert layer["never_routed"] == (count[row] == 0).nonzero().flatten().tolist()


def test_a_plan_is_deterministic_and_source_weights_matter(tmp_path):
    model = checkpoints.make(tmp_path / "m", "deepseek_v4")
    stats = checkpoints.make_statistics(model, tmp_path / "s")
    first = plan.make_plan(model, Wish(keep=8), stats)
    assert plan.make_plan(model, Wish(keep=8), stats) == first
    only_code = plan.make_plan(model, Wish(keep=8, source_weights=("chat=0",)), stats)
    assert only_code["layers"] != first["layers"]
    with pytest.raises(UserError, match="unknown source cide; did you mean code"):
        plan.make_plan(model, Wish(keep=8, source_weights=("cide=1",)), stats)


def test_groups_keep_the_same_number_each(tmp_path):
    model = checkpoints.make(tmp_path / "m", "deepseek_v3")
    stats = checkpoints.make_statistics(model, tmp_path / "s")
    content = plan.make_plan(model, Wish(keep=8), stats)
    for layer in content["layers"].values():
        assert [sum(e // 4 == group for e in layer["kept"]) for group in range(4)] == [2, 2, 2, 2]
    flat = plan.make_plan(model, Wish(keep=8, groups="flatten"), stats)
    assert flat["config_changes"]["n_group"] == [4, 1] and "groups_flattened" in [w["code"] for w in flat["warnings"]]
    assert all(flat["layers"][n]["coverage"] >= content["layers"][n]["coverage"] for n in flat["layers"])


def test_warnings_say_what_is_known(tmp_path):
    model = checkpoints.make(tmp_path / "m", "deepseek_v2")
    stats = checkpoints.make_statistics(model, tmp_path / "s", tokens=2)
    content = plan.make_plan(model, Wish(keep=12), stats)
    assert [w["code"] for w in content["warnings"]] == ["never_routed_kept", "never_routed_dropped", "softmax_mass"]


def test_mtp_by_its_own_scores(tmp_path):
    model = checkpoints.make(tmp_path / "m", "deepseek_v4")
    stats = checkpoints.make_statistics(model, tmp_path / "s", layers=(0, 1, 2, 3, 4))
    content = plan.make_plan(model, Wish(keep=8, mtp="scores"), stats)
    assert list(content["layers"]) == ["0", "1", "2", "3", "4"] and list(content["config_changes"]) == [
        "n_routed_experts"
    ]
    dropped = plan.make_plan(model, Wish(keep=8), stats)
    assert list(dropped["layers"]) == ["0", "1", "2", "3"] and dropped["config_changes"][
        "num_nextn_predict_layers"
    ] == [1, 0]
    lite = checkpoints.make(tmp_path / "lite", "deepseek_v2")
    with pytest.raises(UserError, match="--mtp scores needs MTP layers"):
        plan.make_plan(lite, Wish(keep=8, mtp="scores"), checkpoints.make_statistics(lite, tmp_path / "s2"))


def test_what_is_missing_is_said(tmp_path):
    model = checkpoints.make(tmp_path / "m", "deepseek_v2")
    with pytest.raises(UserError, match="--stats must name a file of `prune observe`"):
        plan.run(model, Wish(keep=8), output=tmp_path / "p")
    with pytest.raises(UserError, match="--output must name the plan"):
        plan.run(model, Wish(keep=8))
    with pytest.raises(UserError, match="--device-memory-gb must be above 0"):
        plan.run(model, Wish(keep=16), output=tmp_path / "p", device_memory_gb=0)
