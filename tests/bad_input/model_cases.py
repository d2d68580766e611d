"""Bases, checkpoints and exports: what other people and other disks hand over, spoilt."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import torch

from megatron_patch.io.hashes import directory_identity
from tests.bad_input.world import Case, World, edit_bytes, edit_json, edit_tensors

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
GATE = "model.layers.1.mlp.gate.weight"
NORM = "model.layers.2.input_layernorm.weight"
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}


def _config(change: Callable[[dict], Any], message: str, command: Callable[[World], list[str]] | None = None) -> Case:
    """config.json of the base edited; `plan` reads nothing else."""

    def build(w: World) -> list[str]:
        edit_json(w.base / "config.json", change)
        return command(w) if command else ["dsa-upcycle", "plan", "--base", str(w.base)]

    return Case(build, message)


def _set(**values: Any) -> Callable[[dict], None]:
    return lambda content: content.update(values)


def _without(key: str) -> Callable[[dict], None]:
    return lambda content: content.pop(key) and None


CONFIGS: dict[str, Case] = {
    "another architecture": _config(_set(architectures=["LlamaForCausalLM"]), r"must be one of .* says \['LlamaFor"),
    "no architecture": _config(_without("architectures"), "says None; give a DeepSeek-V2-Lite"),
    "a config that is a list": _config(lambda c: [c], "config.json must be a JSON object: .* holds a list"),
    "a size missing": _config(_without("kv_lora_rank"), r"lacks \['kv_lora_rank'\]"),
    "a size of text": _config(_set(hidden_size="64"), "hidden_size must be a whole number of 1 or more: .* has '64'"),
    "a size of true": _config(_set(num_attention_heads=True), "num_attention_heads must be a whole number .* has True"),
    "no heads": _config(_set(num_attention_heads=0, num_key_value_heads=0), "num_attention_heads must .* has 0"),
    "more experts a token than experts": _config(_set(num_experts_per_tok=9), "must not exceed n_routed_experts: .* 9 and 8"),
    "odd RoPE": _config(_set(qk_rope_head_dim=7), "qk_rope_head_dim must be even, .* has 7"),
    "another norm epsilon": _config(_set(rms_norm_eps=1e-5), "rms_norm_eps must be 1e-06: .* has 1e-05"),
    "tied embeddings": _config(_set(tie_word_embeddings=True), "tie_word_embeddings must be False: .* has True"),
    "a query latent in the base": _config(_set(q_lora_rank=16), "q_lora_rank must be None: .* has 16"),
    "quantised": _config(_set(quantization_config={"quant_method": "fp8"}), "quantization_config must be None"),
    "sigmoid routing": _config(_set(scoring_func="sigmoid"), "scoring_func must be 'softmax': .* has 'sigmoid'"),
    "RoPE as a list": _config(_set(rope_scaling=[1]), r"rope_scaling must be an object: .* has \[1\]"),
    "another RoPE": _config(_set(rope_scaling={"type": "linear", "factor": 2}), "'default' or 'yarn': .* has 'linear'"),
    "YaRN without factor": _config(_set(rope_scaling={"type": "yarn"}), "YaRN needs factor: .* lacks it"),
    "YaRN with a factor of text": _config(_set(rope_scaling=YARN | {"factor": "40"}), "factor must be a number above 0"),
    "YaRN with an unknown key": _config(
        _set(rope_scaling=YARN | {"attention_factor": 1.2}), r"every key of RoPE must be known: .* \['attention_factor'\]"
    ),
    "RoPE theta of text": _config(_set(rope_theta="1e4"), "rope_theta must be a number above 0: .* has '1e4'"),
    "two RoPE thetas": _config(_set(rope_parameters={"rope_theta": 5}), "rope_theta must be one: .* has 5 and 10000"),
    "RoPE forms of different types": _config(
        _set(rope_parameters={"rope_type": "default", "rope_theta": 10000}), "rope_scaling and rope_parameters must agree"
    ),
    "RoPE forms that lack a key": _config(
        _set(rope_parameters=YARN | {"rope_theta": 10000}), "rope_scaling and rope_parameters must agree"
    ),
    "no config": Case(lambda w: ["dsa-upcycle", "plan", "--base", str(w.path)], "with a config.json: .* has none"),
    "a key twice in the config": Case(
        lambda w: ["dsa-upcycle", "plan", "--base", str(w.file("config.json", '{"vocab_size": 1, "vocab_size": 2}'))],
        "config.json must be JSON: .* 'vocab_size' stands twice",
    ),
    "an export as the base": Case(lambda w: w.train("--base-model", str(w.copy("export"))), r"has dsa_layers \[3, 4\]"),
    "plan over an export": Case(
        lambda w: ["dsa-upcycle", "plan", "--base", str(w.copy("export"))], "must be the model without DSA layers"
    ),
    "a native export as the base": Case(
        lambda w: w.train("--base-model", str(w.copy("native"))), "has DSA in every layer; give the base .*--pretrained-checkpoint"
    ),
    "pruning a native export": Case(
        lambda w: ["dsa-upcycle", "prune", "plan", "--model", str(w.copy("native")), "--keep", "4", "--output", str(w.out)],
        "is in the native layout; prune what `dsa-upcycle export --layout hybrid` writes",
    ),
    "padded vocabulary in the config": _config(_set(vocab_size=336), "must have vocab_size rows: .* has 320, .* 336", World.train),
    "fewer layers in the config": _config(_set(num_hidden_layers=2), r"\d+ unknown \(model\.layers\.2", World.train),
    "fewer experts in the config": _config(_set(n_routed_experts=7), r"\d+ unknown \(model\.layers\.1", World.train),
    "chats beyond the vocabulary": _config(
        _set(vocab_size=200), "model's vocabulary: .* has 259 ids, the model 200",
        lambda w: (edit_tensors(w.base, lambda t: _cut_vocabulary(t, 200)), w.train(kind="sft"))[1],
    ),
}  # fmt: skip


def _cut_vocabulary(tensors: dict[str, torch.Tensor], rows: int) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:rows].clone()


def _tensors(change: Callable[[dict], Any], message: str, *flags: str) -> Case:
    def build(w: World) -> list[str]:
        edit_tensors(w.base, change)
        return w.train(*flags)

    return Case(build, message)


def _base(change: Callable[[World], Any], message: str) -> Case:
    def build(w: World) -> list[str]:
        change(w)
        return w.train()

    return Case(build, message)


def _pad(name: str) -> Callable[[dict], None]:
    return lambda t: t.update({name: torch.cat([t[name], torch.zeros(16, t[name].shape[1])])})


def _index_says(file: str) -> Callable[[World], None]:
    return lambda w: edit_json(w.base / INDEX, lambda c: c["weight_map"].update({GATE: file}))


BASES: dict[str, Case] = {
    "a shard missing": _base(lambda w: (w.base / SHARD).unlink(), rf"{SHARD} does not; download"),
    "a shard truncated": _base(lambda w: edit_bytes(w.base / SHARD, lambda b: b[:-1]), "must be whole: .* truncated"),
    "a shard that is a Git LFS pointer": _base(
        lambda w: w.file(f"base/{SHARD}", "version https://git-lfs.github.com/spec/v1\n"), "must be whole: .*damaged"
    ),
    "an index out of the directory": _base(_index_says("../x.safetensors"), r"own directory: .* in '\.\./x\.safe"),
    "an index with an absolute path": _base(_index_says("/tmp/x.safetensors"), "own directory: .* in '/tmp/x.safe"),
    "an index of another download": _base(_index_says("model-00001-of-00002.safetensors"), "different downloads"),
    "an index that is no JSON": _base(lambda w: w.file(f"base/{INDEX}", "{"), "an index maps tensors to files"),
    "no index": _base(lambda w: (w.base / INDEX).unlink(), "shards need their index: .* has 2 safetensors files"),
    "only pickles": _base(
        lambda w: (edit_tensors(w.base, lambda t: None), (w.base / "model.safetensors").rename(w.base / "pytorch_model.bin")),
        r"only safetensors are read, .* has pytorch_model\.bin",
    ),
    "a damaged tokenizer": _base(lambda w: w.file("base/tokenizer.json", "{}"), "cannot load the tokenizer in"),
    "a tensor missing": _tensors(lambda t: t.pop(GATE) is None, rf"1 missing \({GATE}\)"),
    "a tensor too many": _tensors(lambda t: t.update({GATE + "2": torch.ones(1)}), rf"1 unknown \({GATE}2\)"),
    "a router bias": _tensors(
        lambda t: t.update({"model.layers.1.mlp.gate.e_score_correction_bias": torch.ones(8)}), "1 unknown .*correction_bias"
    ),
    "a tensor of another shape": _tensors(lambda t: t.update({GATE: torch.ones(8, 65)}), r"is \(8, 65\), .* wants \(8, 64\)"),
    "vocabulary padded in both": _tensors(
        lambda t: (_pad("lm_head.weight")(t), _pad("model.embed_tokens.weight")(t)), "embed_tokens.* has 336, .* says 320"
    ),
    "vocabulary padded in the head": _tensors(_pad("lm_head.weight"), "lm_head.weight must have vocab_size rows: .* has 336"),
    "a scalar embedding": _tensors(lambda t: t.update({"lm_head.weight": torch.tensor(1.0)}), "has none, its config"),
    "NaN in the base": _tensors(lambda t: t[GATE].view(-1)[3:5].fill_(torch.nan), rf"must be finite: {GATE} .* holds 2 values"),
    "infinity in the base": _tensors(lambda t: t[GATE].view(-1)[3:4].fill_(-torch.inf), "must be finite: .* holds 1 values"),
    "integers for weights": _tensors(lambda t: t.update({GATE: torch.ones(8, 64, dtype=torch.int8)}), "is torch.int8; quant"),
    "FP8 without scales": _tensors(lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn)}), "is torch.float8_e4m3fn; quant"),
    "two dtypes": _tensors(lambda t: t.update({GATE: t[GATE].bfloat16()}), "the base must have one dtype: .*convert it"),
}  # fmt: skip


def _checkpoint(change: Callable[[World], Any], message: str, *flags: str, command: str = "export") -> Case:
    """The training run spoilt, then exported, resumed or started from."""

    def build(w: World) -> list[str]:
        change(w)
        if command == "export":
            return w.export(*flags)
        return w.train(f"--{command}", str(w.copy("save")), *flags)

    return Case(build, message)


def _manifest(change: Callable[[dict], Any]) -> Callable[[World], None]:
    return lambda w: edit_json(w.iteration / "manifest.json", change)


def _latest(text: str) -> Callable[[World], Any]:
    return lambda w: (w.copy("save") / "latest_checkpointed_iteration.txt").write_text(text)


def _other_base(w: World) -> None:
    edit_bytes(w.base / SHARD, lambda b: b.__setitem__(-1, b[-1] ^ 1))


def _indexers(change: Callable[[dict], Any], message: str) -> Case:
    """The manifest of the base's indexers spoilt, then joined in a native export."""

    def build(w: World) -> list[str]:
        edit_json(w.copy("indexers") / "iter_0000020" / "manifest.json", change)
        return w.export("--layout", "native", "--base-indexers", str(w.copy("indexers")))

    return Case(build, message)


def _set_base(content: dict) -> None:
    content["base"]["sha256"] = "0" * 64


def _adopt(w: World) -> None:
    """Let the checkpoint name the edited base as its own."""
    edit_json(w.iteration / "manifest.json", lambda c: c["base"].update(sha256=directory_identity(w.base)))


def _nothing(w: World) -> None: ...


START = "pretrained-checkpoint"
CHECKPOINTS: dict[str, Case] = {
    "latest names a missing iteration": _checkpoint(_latest("99"), r"99 was not, .* has \[20\]; export takes another"),
    "latest is no number": _checkpoint(_latest("soon"), r"must hold a number: .* write in one of those: .* has \[20\]"),
    "no such iteration": _checkpoint(_nothing, r"7 was not, .* has \[20\]", "--iteration", "7"),
    "no latest file": _checkpoint(lambda w: (w.iteration.parent / "latest_checkpointed_iteration.txt").unlink(), "has latest_"),
    "no manifest": _checkpoint(lambda w: (w.iteration / "manifest.json").unlink(), "must hold manifest.json: .* has none"),
    "manifest that is half": _checkpoint(
        lambda w: edit_bytes(w.iteration / "manifest.json", lambda b: b[:50]), "a manifest must be whole"
    ),
    "manifest without base": _checkpoint(_manifest(_without("base")), "must be whole: .* lacks 'base'"),
    "manifest with a pattern of text": _checkpoint(_manifest(_set(layer_pattern="mla")), "layer_pattern is 'mla'"),
    "manifest with a hash of 3": _checkpoint(_manifest(_set(files={"model.safetensors": 3})), "is no text"),
    "manifest that names no file": _checkpoint(_manifest(_set(files={})), r"lacks model\.safetensors", command=START),
    "manifest of another schema": _checkpoint(_manifest(_set(schema=9)), "schema is 9, this release reads 1"),
    "weights truncated": _checkpoint(
        lambda w: edit_bytes(w.iteration / "model.safetensors", lambda b: b[:-1]), r"model\.safetensors has changed"
    ),
    "weights missing": _checkpoint(lambda w: (w.iteration / "model.safetensors").unlink(), r"model\.safetensors is missing"),
    "checkpoint of another base": _checkpoint(_other_base, "must be the base that the checkpoint was trained on: it was"),
    "start of another base": _checkpoint(_other_base, "belongs to one base: .* change --base-model", command=START),
    "start of another indexer": _checkpoint(_nothing, "belongs to one indexer: .*--index-", "--index-topk", "9", command=START),
    "start of another pattern": _checkpoint(_nothing, "belongs to one layer pattern: ", "--dsa-layers", "1", command=START),
    "resume without training state": _checkpoint(_nothing, r"lacks training\.pt; copy the checkpoint", command="load"),
    "DSA layers as base indexers": Case(
        lambda w: w.export("--layout", "native", "--base-indexers", str(w.copy("save"))),
        r"is a run of --train base-indexers: .* trained DSA layers \(pretrain\); give it as --checkpoint",
    ),
    "base indexers as DSA layers": Case(
        lambda w: w.export("--checkpoint", str(w.copy("indexers"))), "holds trained DSA layers: .* holds the base's indexers"
    ),
    "base indexers of another base": _indexers(_set_base, r"have one base: .* --checkpoint [0-9a-f]{64}; train the base's"),
    "base indexers of another size": _indexers(lambda c: c["dsa"].update(index_head_dim=8), "one --index-head-dim: .* has 8, .* 16"),
    "base indexers that changed": _indexers(lambda c: c["files"].update({"model.safetensors": "0" * 64}), "has changed; copy"),
    "DSA layers that start from base indexers": Case(
        lambda w: w.train("--pretrained-checkpoint", str(w.copy("indexers"))), "train apart: .* has base-indexers, .* DSA layers"
    ),
    "base indexers that start from DSA layers": Case(
        lambda w: w.train("--train", "base-indexers", "--pretrained-checkpoint", str(w.copy("save"))), "train apart: .* has DSA la"
    ),
    "base indexers that start from an export": Case(
        lambda w: w.train("--train", "base-indexers", "--pretrained-checkpoint", str(w.copy("export"))), "is an export; leave"
    ),
    "base indexers on a norm weight of zero": _tensors(
        lambda t: t[NORM].view(-1)[5:6].zero_(), "input_layernorm of layer 2 has 1 zeros; this base cannot", "--train", "base-indexers"
    ),
    "a norm weight of zero": _checkpoint(
        lambda w: (edit_tensors(w.base, lambda t: t[NORM].view(-1)[5:6].zero_()), _adopt(w)),
        f"{NORM} .* 1 of 64 weights are zero .*use --layout hybrid", "--layout", "native",
    ),
    "export without tokenizer": _checkpoint(lambda w: (w.base / "tokenizer.json").unlink(), "the base must have its tokenizer"),
    "export with a broken tokenizer_config": _checkpoint(
        lambda w: w.file("base/tokenizer_config.json", "[1]"), "tokenizer_config.json must be a JSON object"
    ),
    "export to a full directory": Case(
        lambda w: (w.out.mkdir(), w.file("out/mine", ""), w.export())[2], "--output must be a new or empty directory: .*not empty"
    ),
}  # fmt: skip


def _export(change: Callable[[World], Any], message: str, command: Callable[[World], list[str]]) -> Case:
    def build(w: World) -> list[str]:
        change(w)
        return command(w)

    return Case(build, message)


def _foreign(w: World) -> None:
    with (w.copy("export") / "modeling_deepseek_v2_dsa.py").open("a") as file:
        file.write("\nraise SystemExit('code of a model directory ran')\n")


def _flip(w: World) -> None:
    edit_bytes(w.copy("export") / "model-dsa-00001-of-00001.safetensors", lambda b: b.__setitem__(-2, b[-2] ^ 1))


def _latent(w: World) -> None:
    """The last bytes are a query latent's."""
    edit_bytes(w.copy("native") / "model-native-00001.safetensors", lambda b: b.__setitem__(slice(-8, None), b"\0\0\0\x3f" * 2))


def _check_native(w: World) -> list[str]:
    return ["dsa-upcycle", "check", str(w.copy("native")), "--base", str(w.base)]


def _no_tokenizer(w: World) -> None:
    (w.copy("export") / "tokenizer.json").unlink()
    (w.copy("export") / "tokenizer_config.json").unlink()


def _template_of_one_turn(w: World) -> None:
    for directory in (w.copy("export"), w.base):
        (directory / "chat_template.jinja").write_text("{{ raise_exception('one turn only') }}")


def _from_export(w: World) -> list[str]:
    return w.train("--pretrained-checkpoint", str(w.copy("export")))


def _suite(change: Callable[[dict], Any], message: str) -> Case:
    def build(w: World) -> list[str]:
        edit_json(w.copy("suite") / "suite.json", change)
        return w.evaluate()

    return Case(build, message)


EXPORTS: dict[str, Case] = {
    "check a changed file": _export(_flip, "fails files: 1 files have changed since the export: model-dsa", World.check),
    "check foreign code": _export(_foreign, "fails files, code: ", World.check),
    "check without tokenizer": _export(_no_tokenizer, "fails files, tokenizer, chat template: ", World.check),
    "check with a template that refuses": _export(_template_of_one_turn, "fails files, chat template", World.check),
    "check against another base": _export(_other_base, "fails base tensors: 1 of ", World.check),
    "check a base": Case(
        lambda w: ["dsa-upcycle", "check", str(w.base), "--base", str(w.base)], "must pass every check: .* fails config"
    ),
    "check a native export with another latent": _export(
        _latent, "fails native layers, files: .*q_a_proj.weight is not made of the base's norm weights", _check_native
    ),
    "train on from a native export that changed": _export(
        _latent, "files must be as written: .*model-native.* has changed",
        lambda w: w.train("--pretrained-checkpoint", str(w.copy("native"))),
    ),
    "train on from a changed export": _export(_flip, "files must be as written: .*model-dsa.* has changed", _from_export),
    "train on from half a manifest": _export(
        lambda w: edit_bytes(w.copy("export") / "upcycle_manifest.json", lambda b: b[:99]), "manifest must be whole", _from_export
    ),
    "train on from a manifest without files": _export(
        lambda w: edit_json(w.copy("export") / "upcycle_manifest.json", _set(files={})), "must be as written", _from_export
    ),
    "evaluate foreign code": _export(_foreign, "an export's code must be this release's: modeling_", World.evaluate),
    "evaluate without tokenizer": _export(_no_tokenizer, "a tokenizer is a directory with", World.evaluate),
    "evaluate with a shard missing": _export(
        lambda w: (w.copy("export") / SHARD).unlink(), rf"{SHARD} does not; download", World.evaluate
    ),
    "evaluate a base as the model": Case(lambda w: w.evaluate("--model", str(w.base)), "--kind upcycle needs a --model with DSA"),
    "a suite without tasks": _suite(_set(tasks=[]), "tasks must be a list with at least one task"),
    "a suite out of its directory": _suite(lambda s: s["tasks"][0].update(file="../x.jsonl"), "plain name .* '../x.jsonl'"),
    "a suite with a misspelt key": _suite(lambda s: s["tasks"][0].update(chanse=1), "unknown key 'chanse'; did you mean 'chance'"),
}  # fmt: skip

CASES = CONFIGS | BASES | CHECKPOINTS | EXPORTS


# What must work


def split_experts(w: World) -> None:
    """Each expert's three matrices in files of their own."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, torch.Tensor] = {}
    for shard in w.base.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    weight_map = {}
    for number in range(5):
        file = f"model-{number + 1:05d}-of-00005.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number::5]}
        save_file(part, w.base / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (w.base / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def linked(w: World) -> None:
    """Files that are symbolic links, as in the Hugging Face cache."""
    blobs = w.path / "blobs"
    shutil.move(w.base, blobs)
    w.path.joinpath("base").mkdir()
    for file in blobs.iterdir():
        (w.path / "base" / file.name).symlink_to(file)
