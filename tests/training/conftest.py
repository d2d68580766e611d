"""Tiny prepared data and settings for whole runs in this process."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patch.config import TrainSettings
from megatron_patch.flags import parse

ROOT = Path(__file__).parents[2]
WORDS = "the cat sat on a mat and saw one dog run by as it fell over old".split()


@pytest.fixture(scope="session")
def text_prefix(tiny_base, tmp_path_factory):
    """As `write_text`."""
    return write_text(tmp_path_factory.mktemp("text"), tiny_base)


def write_text(folder: Path, base: Path) -> str:
    """60 documents of 5 to 40 words, prepared by the script that users run; their prefix."""
    random.seed(1)
    lines = [json.dumps({"text": " ".join(random.choices(WORDS, k=random.randint(5, 40)))}) for _ in range(60)]
    (folder / "t.jsonl").write_text("\n".join(lines) + "\n")
    _script("prepare_pretrain.py", "--input", folder / "t.jsonl", "--text-key", "text", "--tokenizer", base,
            "--output-prefix", folder / "text")  # fmt: skip
    return str(folder / "text")


@pytest.fixture(scope="session")
def sft_folder(tiny_base, tmp_path_factory):
    """60 chats of one or three turns, so that samples differ in length and in supervised tokens."""
    folder = tmp_path_factory.mktemp("chat")
    random.seed(2)
    lines = []
    for i in range(60):
        turns = []
        for _ in range(1 + 2 * (i % 2)):
            word = random.choice(WORDS)
            turns += [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word * (1 + i % 3)}]
        lines.append(json.dumps({"messages": turns}))
    (folder / "c.jsonl").write_text("\n".join(lines) + "\n")
    _script("prepare_sft.py", "--input", folder / "c.jsonl", "--tokenizer", tiny_base, "--seq-length", "128",
            "--output", folder / "sft")  # fmt: skip
    return str(folder / "sft")


def _script(name: str, *args) -> None:
    command = [sys.executable, ROOT / "data" / name, *map(str, args)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)


def settings_of(base, save, data_path: str, **flags) -> TrainSettings:
    """Settings of a small run on a base; keyword arguments are flags."""
    values = {
        "base_model": base, "data_path": data_path, "save": save, "train_iters": 6, "seq_length": 64,
        "index_topk": 8, "index_n_heads": 4, "index_head_dim": 16, "global_batch_size": 4, "micro_batch_size": 2,
        "lr": 1e-3, "eval_interval": 0, "eval_iters": 1, "log_interval": 1, "device": "cpu", "split": "80,20",
    }  # fmt: skip
    argv = []
    for name, value in (values | flags).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            argv += [f"--{flag}", str(value)]
    return parse(TrainSettings, argv, prog="test")


@pytest.fixture(scope="session")
def make_settings(tiny_base):
    """`settings_of` the tiny base."""
    return lambda save, data_path, **flags: settings_of(tiny_base, save, data_path, **flags)


@pytest.fixture(scope="session")
def runs(device, two_ranks, text_prefix, sft_folder, tmp_path_factory):
    """(form, ranks, further flags) -> the --save directory of an uninterrupted run, made once."""
    from megatron_patch.config import SFT
    from megatron_patch.training.loop import train
    from tests.training.rank_runs import FLAGS, of_form, quiet, train_quietly

    made = {}

    def run(make_settings, form: str, count: int, **more):
        key = (form, count, *sorted(more.items()))
        if key not in made:
            kind, flags = of_form(form)
            save = tmp_path_factory.mktemp("run") / "save"
            settings = make_settings(save, run.data_of(kind), **FLAGS | flags | more)
            if count == 1:
                assert train(settings, kind, device) == 0
            else:
                quiet(two_ranks.run(train_quietly, settings, kind))
            made[key] = save
        return made[key]

    run.data_of = lambda kind: sft_folder if kind == SFT else text_prefix
    return run
