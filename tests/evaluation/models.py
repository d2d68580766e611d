"""Fake exports: a tiny base with DSA layers written on top, as `dsa-upcycle export` would lay them out."""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_patch.checkpoint.export_files import copy_code, export_config
from megatron_patch.checkpoint.hf_mapping import hybrid_mapping, sizes
from megatron_patch.data.tokenizer import load_tokenizer
from megatron_patch.evaluation.loading import inspect_directory, load_model
from megatron_patch.model.architecture import DsaSettings, read_architecture, read_config
from megatron_patch.model.layer_pattern import appended_pattern
from tests.tiny import make_tiny_base, make_tiny_tokenizer

DSA = DsaSettings(index_topk=8, index_n_heads=2, index_head_dim=16)
OUT_PROJECTIONS = ("o_proj.weight", "down_proj.weight")  # zero: the layer adds nothing to its input


def make_fake_export(path: Path, base: Path, *, zeroed: bool, num_dsa: int = 2, seed: int = 1) -> Path:
    """`zeroed`: the DSA layers' out-projections are zero, so that the model is its base exactly."""
    shutil.copytree(base, path)
    arch, pattern = read_architecture(base), appended_pattern(read_architecture(base).num_layers, num_dsa)
    of_base = set(hybrid_mapping(arch, appended_pattern(arch.num_layers, 0)).hf_names)
    generator, new = torch.Generator().manual_seed(seed), {}
    for name, shape in hybrid_mapping(arch, pattern).shapes(sizes(arch, DSA)).items():
        if name in of_base:
            continue
        new[name] = torch.randn(shape, generator=generator) * (0.15 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        if zeroed and name.endswith(OUT_PROJECTIONS):
            new[name].zero_()
    shard = "model-dsa.safetensors"
    save_file(new, path / shard, metadata={"format": "pt"})
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(new, shard)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = export_config(read_config(base), pattern, DSA, arch.hidden_size)
    (path / "config.json").write_text(json.dumps(config))
    copy_code(path)
    return path


def edit_tensors(directory: Path, file: str, change) -> None:
    """Load a safetensors file, let `change` edit the dictionary of tensors, and write it back."""
    tensors = load_file(directory / file)
    change(tensors)
    save_file(tensors, directory / file, metadata={"format": "pt"})


def edit_json(file: Path, **values) -> None:
    """Set top-level keys of a JSON file; `...` removes one."""
    content = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def write_suite(path: Path, rows: int = 6) -> Path:
    """A small suite for the byte tokenizer: rows of differing lengths, all longer than the fake exports' top-k."""
    path.mkdir(parents=True)
    tasks = [
        {"name": name, "file": f"{name}.jsonl", "metric": "exact_match", "chance": 0.1, "taught_to_base": taught}
        for name, taught in (("echo", True), ("owner", False))
    ]
    for task in tasks:
        lines = [
            {"messages": [{"role": "user", "content": f"{task['name']} {'x' * (3 * i)}"}], "answer": str(i)}
            for i in range(rows)
        ]
        (path / task["file"]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = [f"It is a truth universally acknowledged {'that a man ' * i}" for i in range(rows)]
    (path / "heldout.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    content = {
        "schema": 1,
        "name": "tiny",
        "tasks": tasks,
        "perplexity": {"file": "heldout.jsonl", "text_key": "text", "max_length": 48},
    }
    (path / "suite.json").write_text(json.dumps(content))
    return path


def make_talking_base(path: Path) -> Path:
    """A tiny base with the byte tokenizer that answers " 2" and stops; exports of it answer " 1", " 12" and the like.

    Three directions of the embedding say "a colon", "a space", "a digit"; the head has a space follow a colon, a digit a
    space, and EOS (or a further digit) a digit. What the layers add decides which.
    """
    make_tiny_base(path)
    make_tiny_tokenizer(path)
    tokenizer = load_tokenizer(path)
    colon, space, one, two = (tokenizer.encode(sign, add_special_tokens=False)[0] for sign in ": 12")
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(64, 3, generator=generator)).Q.T

    def embed(tensors):
        for direction, tokens in zip(basis, ((colon,), (space,), (one, two)), strict=True):
            tensors["model.embed_tokens.weight"][list(tokens)] += 15 * direction

    def head(tensors):
        weight = 0.02 * tensors["lm_head.weight"]
        for token, follows in ((space, 0), (one, 1), (two, 1), (tokenizer.eos_token_id, 2), (one, 2), (two, 2)):
            weight[token] = weight[token] + basis[follows] + 0.3 * torch.randn(64, generator=generator)
        weight[tokenizer.eos_token_id] *= 2
        tensors["lm_head.weight"] = weight

    edit_tensors(path, index["model.embed_tokens.weight"], embed)
    edit_tensors(path, index["lm_head.weight"], head)
    return path


@torch.inference_mode()
def written_answers(directory: Path, questions: list[str], longest: int = 6) -> dict[str, str]:
    """What the model in `directory` answers by `generate`, to those questions where it stops in time and says something."""
    model, tokenizer = load_model(inspect_directory(directory)), load_tokenizer(directory)
    answers = {}
    for question in questions:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        written = model.generate(**ids, max_new_tokens=longest, do_sample=False, pad_token_id=0)[0]
        text = tokenizer.decode(written[ids["input_ids"].shape[1] :])
        if re.fullmatch(r" [12]+<eos>", text):
            answers[question] = text.removeprefix(" ").removesuffix("<eos>")
    return answers


def write_talking_suite(path: Path, export: Path) -> Path:
    """A suite in which the talking base and its export are each right in some rows, and differ."""
    questions = [f"{'abcdefgh'[i % 8] * (1 + i % 5)} {i * i}?" for i in range(30)]
    written = written_answers(export, questions)
    assert len(set(written.values())) >= 3, "the export says too little: take other questions"
    answers = {"echo": lambda i, said: said if i % 2 else "2", "owner": lambda i, said: said}
    write_suite(path)
    for name, answer in answers.items():
        lines = [
            {"messages": [{"role": "user", "content": question}], "answer": answer(i, written.get(question, "21"))}
            for i, question in enumerate(questions)
        ]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
