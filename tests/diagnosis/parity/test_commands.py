"""`dsa-upcycle parity run | dump | diff` through the dispatcher: files, exit codes, refusals."""

import json

import numpy as np
import pytest
import torch

from megatron_patch.cli import dispatch
from megatron_patch.diagnosis.parity.records import load_dump
from megatron_patch.errors import UserError
from tests.diagnosis.parity.sides import model_of


def command(*words) -> int:
    return dispatch(["parity", *map(str, words)])


def text_flags(journey, tokens=96):
    return "--text", journey.text, "--seq-length", tokens


def test_run_writes_the_three_files(journey, tmp_path, capsys):
    output = tmp_path / "parity"
    flags = ("--checkpoint", journey.save, "--hf", journey.export, *text_flags(journey), "--documents", 3)
    assert command("run", *flags, "--output", output, "--dtype", journey.dtype, "--json", tmp_path / "p.json") == 0
    assert {item.name for item in output.iterdir()} == {"parity.json", "parity.md", "parity.png"}
    report = json.loads((output / "parity.json").read_text())
    assert report == json.loads((tmp_path / "p.json").read_text())
    assert report["schema"] == 1 and report["verdict"] == "pass"
    assert report["weights"]["max_abs"] == 0 and report["logprobs"]["worst"][0]["text"]
    closes = {row["name"]: row["logprob_max"] for row in report["ablations"]}
    assert set(closes) >= {"force_routes", "force_indices", "force_routes_and_indices"}
    if journey.dtype == "float32":
        assert closes["force_routes_and_indices"] <= 1e-5
    else:
        assert closes["fp32"] <= 1e-5 and next(r for r in report["ablations"] if r["name"] == "fp32")["closes"]
    assert "verdict: pass" in capsys.readouterr().out


def test_short_documents_do_not_test_the_indexer(fp32, tmp_path):
    flags = ("--checkpoint", fp32.save, "--hf", fp32.export, *text_flags(fp32, 8))
    assert command("run", *flags, "--output", tmp_path / "parity") == 0
    report = json.loads((tmp_path / "parity" / "parity.json").read_text())
    assert report["verdict"] == "not_tested" and report["index"]["tested"] is False


def test_dumps_of_two_machines(fp32, tmp_path):
    assert command("dump", "--checkpoint", fp32.save, *text_flags(fp32), "--output", tmp_path / "a") == 0
    assert command("dump", "--hf", fp32.export, "--tokens-of", tmp_path / "a", "--output", tmp_path / "b") == 0
    assert command("diff", tmp_path / "a", tmp_path / "b", "--hf", fp32.export, "--output", tmp_path / "diff") == 0
    assert command("diff", tmp_path / "a", tmp_path / "a", "--output", tmp_path / "self") == 0
    report = json.loads((tmp_path / "self" / "parity.json").read_text())
    assert report["logprobs"]["max"] == 0 and report["router"]["agreement"] == 1 and report["index"]["jaccard"] == 1


def test_a_wrong_export_fails(fp32, tmp_path):
    """One tensor of the export was scaled after it was written: exit code 2, its name, the fault's id."""
    import shutil

    from safetensors.torch import load_file, save_file

    wrong = tmp_path / "export"
    shutil.copytree(fp32.export, wrong)
    file = next(wrong.glob("model-dsa-*.safetensors"))
    tensors = load_file(file)
    name = "model.layers.4.mlp.shared_experts.down_proj.weight"
    tensors[name] *= 1.01
    save_file(tensors, file, metadata={"format": "pt"})
    flags = ("--checkpoint", fp32.save, "--hf", wrong, *text_flags(fp32))
    assert command("run", *flags, "--output", tmp_path / "parity") == 2
    report = json.loads((tmp_path / "parity" / "parity.json").read_text())
    assert report["weights"]["differing"] == [name] and report["weights"]["max_abs"] > 0
    assert report["suspected"][0]["fault"] == "shared_expert_scaled" and report["verdict"] == "fail"


@pytest.mark.parametrize(("tokens", "code", "verdict"), [(8, 0, "not_tested"), (96, 2, "fail")])
def test_a_native_export_is_the_trainers_model_up_to_topk(fp32, tmp_path, tokens, code, verdict):
    """With neutral indexers in the base's layers; beyond top-k these attend to other keys, module by module rightly."""
    from megatron_patch.checkpoint.export import export

    export(fp32.save, fp32.base, tmp_path / "native", layout="native", progress=False)
    flags = ("--checkpoint", fp32.save, "--hf", tmp_path / "native", *text_flags(fp32, tokens))
    assert command("run", *flags, "--output", tmp_path / "parity") == code
    report = json.loads((tmp_path / "parity" / "parity.json").read_text())
    assert report["verdict"] == verdict and report["first_divergence"] is None and not report["suspected"]
    assert report["weights"]["frozen_bit_equal"] and not report["weights"]["missing"] + report["weights"]["extra"]
    if verdict == "fail":
        assert "attend to top-k keys on one side" in report["reasons"][0] and len(report["reasons"]) == 1
    else:
        assert report["logprobs"]["max"] < 5e-3  # the query latent's eps at small variances


@torch.no_grad()
def rollout(fp32, response=40):
    """(token ids, log-probs of the last `response` tokens, routes [T, layers, K]) as an engine records them."""
    model = model_of(fp32)
    tokens = torch.randint(3, 250, (96,), generator=torch.Generator().manual_seed(5))
    routes = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda _m, _i, out: routes.append(out[2]))
    log_probs = model(tokens[None]).logits[0].float().log_softmax(-1)
    values = log_probs[:-1].gather(-1, tokens[1:, None])[-response:, 0]
    dense = torch.zeros_like(routes[0])
    return tokens, values, torch.stack([dense, *routes], dim=1)


@pytest.mark.parametrize("suffix", ["jsonl", "npz"])
@pytest.mark.parametrize("rows", [96, 95])  # vLLM records every token, SGLang none for the last
def test_a_rollout_is_a_side(fp32, tmp_path, suffix, rows):
    tokens, values, routes = rollout(fp32)
    file = tmp_path / f"rollout.{suffix}"
    content = {"input_ids": tokens, "rollout_log_probs": values, "routed_experts": routes[:rows]}
    if suffix == "npz":
        np.savez(file, **{name: value.numpy() for name, value in content.items()})
    else:
        file.write_text(json.dumps({name: value.tolist() for name, value in content.items()}) + "\n")
    assert command("dump", "--checkpoint", fp32.save, "--tokens-of", file, "--output", tmp_path / "trainer") == 0
    flags = ("diff", tmp_path / "trainer", file, "--hf", fp32.export)
    assert command(*flags, "--output", tmp_path / "good") == 0
    report = json.loads((tmp_path / "good" / "parity.json").read_text())
    assert report["logprobs"]["tokens"] == 40 and report["logprobs"]["max"] < 1e-5
    assert report["router"]["agreement"] > (0.9 if rows == 95 else 0.999)
    if suffix == "jsonl":
        file.write_text(json.dumps({n: v.tolist() for n, v in (content | {"rollout_log_probs": values - 0.05}).items()}) + "\n")
        assert command(*flags, "--output", tmp_path / "bad") == 2


WRONG_ROLLOUTS = {
    "padding": ({"input_ids": [-100] + [5] * 95}, "token ids must be from 0 to 319"),
    "another vocabulary": ({"input_ids": [99999] + [5] * 95}, "token ids must be from 0 to 319"),
    "floats": ({"input_ids": [1.5] * 96}, "flat list of whole numbers"),
    "nested": ({"input_ids": [[1] * 96]}, "flat list of whole numbers"),
    "ragged": ({"input_ids": [[1], [2, 3]]}, "array of numbers"),
    "text": ({"input_ids": "abc"}, "array of numbers"),
    "beyond int64": ({"input_ids": [2**70]}, "array of numbers"),
    "no tokens": ({"input_ids": None}, "array of numbers"),
    "null": ({"rollout_log_probs": None}, "array of numbers"),
    "scalar": ({"rollout_log_probs": -1.0}, "last tokens of input_ids"),
    "too many": ({"rollout_log_probs": [-1.0] * 97}, "last tokens of input_ids"),
    "probabilities": ({"rollout_log_probs": [0.5] * 40}, "at most 0"),
    "NaN": ({"rollout_log_probs": [float("nan")] * 40}, "finite"),
    "layers missing": ({"routed_experts": [[[0, 1]] * 2] * 96}, "dense layers included"),
    "ragged routes": ({"routed_experts": [[[0, 1]] * 5] * 95 + [[[0, 1]]]}, "array of numbers"),
    "no routes": ({"routed_experts": [[[]]]}, "dense layers included"),
    "one expert twice": ({"routed_experts": [[[1, 1]] * 5] * 96}, "distinct"),
    "no such expert": ({"routed_experts": [[[0, 8]] * 5] * 96}, "ids from 0 to 7"),
}


@pytest.mark.parametrize("case", WRONG_ROLLOUTS.values(), ids=WRONG_ROLLOUTS)
def test_a_wrong_rollout_is_one_line(fp32, tmp_path, case):
    change, message = case
    good = {"input_ids": [5] * 96, "rollout_log_probs": [-1.0] * 40}
    file = tmp_path / "rollout.jsonl"
    file.write_text(json.dumps(good | change) + "\n")
    command_line = ["dump", "--hf", fp32.export, "--tokens-of", file] if "input_ids" in change else ["diff", file, file, "--hf", fp32.export]
    with pytest.raises(UserError, match=message) as error:
        command(*command_line, "--output", tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_a_truncated_archive_is_one_line(fp32, tmp_path):
    np.savez(tmp_path / "r.npz", input_ids=np.arange(96))
    (tmp_path / "r.npz").write_bytes((tmp_path / "r.npz").read_bytes()[:200])
    with pytest.raises(UserError, match="without pickled objects"):
        command("diff", tmp_path / "r.npz", tmp_path / "r.npz", "--hf", fp32.export, "--output", tmp_path / "out")


def test_the_judging_model_must_be_the_dumped_one(fp32, tmp_path):
    assert command("dump", "--hf", fp32.export, *text_flags(fp32), "--output", tmp_path / "a") == 0
    with pytest.raises(UserError, match=r"has 5 layers, .* has 3; give the export"):
        command("diff", tmp_path / "a", tmp_path / "a", "--hf", fp32.base, "--output", tmp_path / "out")


def test_a_dump_comes_back_whole(fp32, tmp_path):
    assert command("dump", "--hf", fp32.export, *text_flags(fp32), "--output", tmp_path / "a") == 0
    dump = load_dump(tmp_path / "a")
    assert dump.side == "checkpoint" and dump.layers == [0, 1, 2, 3, 4] and dump.topk == 8
    assert dump.layer(4)["indices"].shape == (96, 8)


REFUSED = {
    "no side": ("dump", "--text", "T", "--seq-length", "96", "one side"),
    "two sides": ("dump", "--text", "T", "--seq-length", "96", "--checkpoint", "S", "--hf", "E", "one side"),
    "no tokens": ("dump", "--hf", "E", "tokens come from one source"),
    "no length": ("dump", "--hf", "E", "--text", "T", "needs --seq-length"),
    "too little text": ("dump", "--hf", "E", "--text", "T", "--seq-length", "100000", "must hold --seq-length tokens"),
    "too many documents": ("dump", "--hf", "E", "--text", "T", "--seq-length", "9", "--documents", "5", "raise it"),
    "no such text": ("dump", "--hf", "E", "--text", "nowhere.txt", "--seq-length", "96", "file of text"),
    "no dump": ("diff", "E", "E", "a dump is a directory"),
    "another base": ("dump", "--checkpoint", "S", "--base", "E", "--text", "T", "--seq-length", "96", "without DSA layers"),
    "no checkpoint": ("dump", "--checkpoint", "E", "--text", "T", "--seq-length", "96", "latest_checkpointed_iteration"),
    "no model": ("dump", "--hf", "S", "--text", "T", "--seq-length", "96", "config.json"),
    "unknown command": ("compare", "unknown command"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line(fp32, tmp_path, case):
    *words, message = case
    places = {"T": fp32.text, "S": fp32.save, "E": fp32.export}
    words = [str(places.get(word, word)) for word in words]
    if words[0] in ("dump", "diff"):
        words += ["--output", str(tmp_path / "out")]
    with pytest.raises(UserError, match=message) as error:
        dispatch(["parity", *words])
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_other_tokens_are_refused(fp32, tmp_path):
    for name, tokens in (("a", 96), ("b", 90)):
        assert command("dump", "--hf", fp32.export, *text_flags(fp32, tokens), "--output", tmp_path / name) == 0
    with pytest.raises(UserError, match="same tokens"):
        command("diff", tmp_path / "a", tmp_path / "b", "--output", tmp_path / "out")


@pytest.mark.parametrize("damage", ["truncated", "another schema", "missing"])
def test_a_damaged_dump_is_refused(fp32, tmp_path, damage):
    folder = tmp_path / "a"
    assert command("dump", "--hf", fp32.export, *text_flags(fp32), "--output", folder) == 0
    records, meta = folder / "records.safetensors", folder / "dump.json"
    if damage == "truncated":
        records.write_bytes(records.read_bytes()[:-100])
    elif damage == "missing":
        records.unlink()
    else:
        meta.write_text(meta.read_text().replace('"schema": 1', '"schema": 9'))
    with pytest.raises(UserError, match="dump"):
        load_dump(folder)
