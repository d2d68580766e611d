"""`prune verify` sees what a loader would not: each kind of damage fails the check that is meant for it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.pruning import apply, verify, verify_logits
from megatron_patch.pruning.hooks import moe_blocks
from megatron_patch.pruning.wish import Wish
from tests.pruning import checkpoints
from tests.pruning.conftest import make_pruned, prune


def result(model, output, plan, tmp_path, **options) -> dict[str, tuple[str, str]]:
    code = verify.run(model, output, plan, json_file=tmp_path / "verify.json", **options)
    content = json.loads((tmp_path / "verify.json").read_text())
    assert content["schema"] == 1 and content["verdict"] == ("pass" if code == 0 else "fail")
    return {check["name"]: (check["status"], check["detail"]) for check in content["checks"]}


def test_a_sound_output_passes(pruned, tmp_path):
    checks = result(pruned.model, pruned.output, pruned.plan, tmp_path)
    assert {status for status, _ in checks.values()} <= {"ok", "skipped"}
    assert checks["masked oracle"][0] == "ok" and "routed mass" in checks["masked oracle"][1]
    hashed = json.loads(pruned.plan.read_text())["model_type"] == "deepseek_v4"
    assert checks["hash tables"][0] == ("ok" if hashed else "skipped")


def test_flattened_groups_pass(tmp_path):
    made = make_pruned(tmp_path, "deepseek_v3", Wish(keep=7, groups="flatten"))
    assert result(made.model, made.output, made.plan, tmp_path)["masked oracle"][0] == "ok"


def test_a_quantised_model_is_not_run(tmp_path, capsys):
    made = make_pruned(tmp_path, "deepseek_v3", quantise="fp8")
    checks = result(made.model, made.output, made.plan, tmp_path)
    assert checks["masked oracle"][0] == "skipped" and "quantised (F8_E4M3)" in checks["masked oracle"][1]
    assert checks["kept tensors"][0] == "ok"
    assert "verdict: pass" in capsys.readouterr().out


def test_too_large_models_and_no_logits_are_skipped(v4, tmp_path):
    assert (
        "more than --max-model-gb"
        in result(v4.model, v4.output, v4.plan, tmp_path, max_model_gb=1e-6)["masked oracle"][1]
    )
    assert result(v4.model, v4.output, v4.plan, tmp_path, logits=False)["masked oracle"] == (
        "skipped",
        "left out by --no-logits",
    )


def edit(output, name, change):
    """Change one tensor of the output, or remove it (None), keeping index and shards in agreement."""
    index = output / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = output / content["weight_map"][name]
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    if changed is None:
        del content["weight_map"][name]
    else:
        tensors[name] = changed
    save_file(tensors, file, metadata={"format": "pt"})
    content["metadata"].pop("total_size")
    index.write_text(json.dumps(content))


def flip(tensor):
    changed = tensor.clone()
    changed.view(-1)[0] += 1
    return changed


def same_twice(table):
    changed = table.clone()
    changed[7] = table[7][0]
    return changed


def out_of_range(table):
    changed = table.clone()
    changed[7, 0] = 8
    return changed


def swapped_rows(table):
    return table.roll(1, 0)


def rename(tensor_name, new_name):
    def change(output):
        index = output / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        file = output / content["weight_map"][tensor_name]
        tensors = load_file(file)
        tensors[new_name] = tensors.pop(tensor_name)
        save_file(tensors, file, metadata={"format": "pt"})
        content["weight_map"][new_name] = content["weight_map"].pop(tensor_name)
        index.write_text(json.dumps(content))

    return change


def config_key(key, value):
    def change(output):
        config = json.loads((output / "config.json").read_text())
        config[key] = value
        (output / "config.json").write_text(json.dumps(config))

    return change


def truncate(output):
    shard = sorted(output.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-8])


def link_readme(output):
    (output / "README.md").unlink()
    (output / "README.md").hardlink_to(output.parent / "model" / "README.md")


TABLE = "layers.0.ffn.gate.tid2eid"


@pytest.mark.parametrize(
    "check, words, damage",
    [
        ("index", "truncated or damaged", truncate),
        ("index", "stray.safetensors", lambda o: save_file({"x": torch.zeros(1)}, o / "stray.safetensors")),
        ("index", "says 5 bytes", lambda o: _total_size(o, 5)),
        ("names and numbers", "expert 8 of 9", rename("layers.2.ffn.experts.7.w1.weight", "layers.2.ffn.experts.8.w1.weight")),
        ("names and numbers", "lacks w1.weight", lambda o: edit(o, "layers.2.ffn.experts.3.w1.weight", lambda _: None)),
        ("names and numbers", "missing, the first is norm.weight", lambda o: edit(o, "norm.weight", lambda _: None)),
        ("names and numbers", "is of no tensor of the source", rename("norm.weight", "other.weight")),
        ("names and numbers", "mtp.0.x is of no tensor", rename("norm.weight", "mtp.0.x")),
        ("shapes", "norm.weight is BF16", lambda o: edit(o, "norm.weight", lambda t: t.bfloat16())),
        ("kept tensors", "differs from the source's layers.2", lambda o: edit(o, "layers.2.ffn.experts.3.w1.weight", flip)),
        ("kept tensors", "embed.weight differs", lambda o: edit(o, "embed.weight", flip)),
        ("routers", "layers.2.ffn.gate.weight is not the rows", lambda o: edit(o, "layers.2.ffn.gate.weight", flip)),
        ("routers", "layers.2.ffn.gate.bias is not the rows", lambda o: edit(o, "layers.2.ffn.gate.bias", flip)),
        ("hash tables", "name an expert twice, the first is token 7", lambda o: edit(o, TABLE, same_twice)),
        ("hash tables", "has 0 to 8", lambda o: edit(o, TABLE, out_of_range)),
        ("hash tables", "is not the table of the plan", lambda o: edit(o, TABLE, swapped_rows)),
        ("config", "rope_theta: 5, not '(absent)'", config_key("rope_theta", 5)),
        ("config", "num_nextn_predict_layers: 1, not 0", config_key("num_nextn_predict_layers", 1)),
        ("other files", "README.md is not the source's", lambda o: (o / "README.md").write_text("other")),
        ("other files", "is one file with the source's", link_readme),
        ("other files", "prune_plan.json is missing", lambda o: (o / apply.PLAN_COPY).unlink()),
    ],
)  # fmt: skip
def test_damage_is_found(v4, tmp_path, check, words, damage):
    model, output = tmp_path / "model", tmp_path / "out"
    shutil.copytree(v4.model, model)
    shutil.copytree(v4.output, output)
    damage(output)
    status, detail = result(model, output, v4.plan, tmp_path)[check]
    assert status == "FAIL" and words in detail, detail


def test_an_mtp_layer_that_the_plan_drops_is_found(v4, tmp_path):
    """With its 16 experts beside a config of 8, or pruned although it should be gone."""
    stats = checkpoints.make_statistics(v4.model, tmp_path / "s", layers=(0, 1, 2, 3, 4))
    made = prune(tmp_path, v4.model, stats, Wish(keep=8, mtp="scores"))
    status, detail = result(v4.model, made.output, v4.plan, tmp_path)["names and numbers"]
    assert status == "FAIL" and "MoE layers are not the plan's, the first that differs is 4" in detail


def _total_size(output, size):
    index = output / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"]["total_size"] = size
    index.write_text(json.dumps(content))


def test_the_oracle_sees_what_the_bytes_do_not(tmp_path, monkeypatch):
    """Were the renumbering wrong in the plan and the files alike, only the logits would tell."""
    made = make_pruned(tmp_path, "deepseek_v3")
    real = verify_logits.load_model

    def other_order(path, **options):
        model = real(path, **options)
        if path == made.output:
            for block in moe_blocks(model).values():
                block.gate.weight.data = block.gate.weight.data.flip(0)
        return model

    monkeypatch.setattr(verify_logits, "load_model", other_order)
    status, detail = result(made.model, made.output, made.plan, tmp_path)["masked oracle"]
    assert status == "FAIL" and "largest difference" in detail


def test_keep_all_passes(tmp_path):
    made = make_pruned(tmp_path, "deepseek_v4", Wish(keep=checkpoints.EXPERTS))
    checks = result(made.model, made.output, made.plan, tmp_path)
    assert {status for status, _ in checks.values()} == {"ok"}
    assert "largest difference 0.0e+00" in checks["masked oracle"][1]


def test_an_upcycled_export_runs_with_its_own_class(tmp_path, tiny_base):
    """Its DSA layers have experts too; transformers' own class would give them random queries."""
    from tests.hf_model.hybrid import make_tiny_export

    model = make_tiny_export(tmp_path / "model", tiny_base)
    stats = checkpoints.make_statistics(model, tmp_path / "stats.safetensors")
    made = prune(tmp_path, model, stats, Wish(keep=4))
    checks = result(made.model, made.output, made.plan, tmp_path)
    assert checks["masked oracle"][0] == "ok", checks["masked oracle"]
    assert "4 MoE layers with experts 0 to 3" in checks["names and numbers"][1]
