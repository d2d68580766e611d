"""verl 0.9.1 loads our directories, reads our data and calls our rewards, each through its own code."""

import json
import re
import shutil

import pyarrow as pa
import pytest
from pyarrow import parquet

from megatron_patch.data.chat import ChatEncoder
from megatron_patch.data.tokenizer import load_tokenizer
from tests.checkpoint.test_check import edit_json, edit_tensors
from tests.verl.conftest import run_inside
from tests.verl.launches import overrides

CHATS = [
    [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
        {"role": "assistant", "content": "Four."},
    ],
]


def truth(row: dict) -> str:
    """Computed from the question's text, not from the row's answer."""
    a, sign, b = re.search(r"What is (\d+) ([+-]) (\d+)\?", row["prompt"][-1]["content"]).groups()
    return str(int(a) + int(b) if sign == "+" else int(a) - int(b))


@pytest.fixture(scope="module")
def damaged(native, tmp_path_factory):
    """A native export without one tensor: transformers alone would go on with a random one."""
    path = shutil.copytree(native, tmp_path_factory.mktemp("damaged") / "native")
    lost = "model.layers.4.self_attn.indexer.wk.weight"
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    edit_tensors(path / index[lost], lambda tensors: tensors.pop(lost))
    edit_json(path / "model.safetensors.index.json", lambda content: content["weight_map"].pop(lost))
    return path


@pytest.fixture(scope="module")
def rows(rl_data) -> list[dict]:
    return parquet.read_table(rl_data / "validation.parquet").to_pylist()


@pytest.fixture(scope="module")
def report(exports, damaged, rl_data, rows, tmp_path_factory):
    work = tmp_path_factory.mktemp("read")
    parquet.write_table(pa.table({"messages": CHATS}), work / "chats.parquet")
    responses = [f"Answer: {truth(row)}" if i % 2 else "Answer: 12345" for i, row in enumerate(rows)]
    given = overrides("grpo_v2_lite_cuda", PROMPT_LENGTH="128")
    return run_inside(
        "load_and_read.py", work, overrides=given, **exports, damaged=damaged, data=rl_data, chats=work / "chats.parquet",
        responses=responses,
    )  # fmt: skip


@pytest.mark.parametrize("layout, name", [("native", "DeepseekV32ForCausalLM"), ("hybrid", "DeepseekV2DsaForCausalLM")])
def test_loads_with_the_directorys_code(report, layout, name):
    got = report["remote"][layout]
    assert (
        got["auto_class"] == "AutoModelForCausalLM" and got["class"] == name and "transformers_modules" in got["module"]
    )
    assert got["problems"] == 0 and got["attention"] == "sdpa" and got["ids"] == [1, 2, 0]


def test_external_lib_loads_native_without_the_directorys_code(report):
    got = report["registered"]
    assert got["module"] == "megatron_patch.verl.external" and got["class"] == "DeepseekV32ForCausalLM"
    assert got["config"] == "DeepseekV32SoftmaxConfig" and got["problems"] == 0 and got["frozen"] == 25


def test_external_lib_refuses_what_would_train_random_tensors(report):
    assert "has 1 missing keys, e.g. model.layers.4.self_attn.indexer.wk.weight" in report["damaged"]["error"]


def test_rl_rows_are_read_whole(report, rl_data, rows):
    for part in ("train", "validation"):
        written = parquet.read_table(rl_data / f"{part}.parquet").to_pylist()
        assert len(report[part]) == len(written) > 1
        for got, row in zip(report[part], written, strict=True):
            assert got["raw_prompt"] == row["prompt"] and got["reward_model"] == row["reward_model"]
    assert not {row["raw_prompt"][0]["content"] for row in report["train"]} & {r["prompt"][0]["content"] for r in rows}


def test_prompts_have_one_bos_and_the_template(report, native):
    tokenizer = load_tokenizer(native)
    for row in report["validation"]:
        text = f"<bos>User: {row['raw_prompt'][0]['content']}\n\nAssistant:"
        assert tokenizer.decode(row["ids"]) == text and row["ids"].count(1) == 1


def test_verls_chats_are_our_chats(report, native):
    """Token for token, the loss mask too: SFT here and SFT in verl teach the same."""
    encoder = ChatEncoder(load_tokenizer(native))
    for chat, got in zip(CHATS, report["chats"], strict=True):
        ours = encoder.encode(chat, "test")
        assert got["input_ids"] == list(ours.input_ids)
        assert got["loss_mask"] == list(ours.loss_mask)


def test_sft_rows_are_the_training_questions_with_answers(report):
    assert len(report["answers"]) == len(report["train"])
    assert all(sum(row["loss_mask"]) > 0 for row in report["answers"])


def test_rewards_come_through_verls_manager(report, rows):
    """Half of the responses are right by the arithmetic of the test itself."""
    scores = [result["reward_score"] for result in report["rewards"]]
    assert scores == [float(i % 2) for i in range(len(rows))]
    assert report["rewards"][0]["reward_extra_info"] == {"score": 0.0, "acc": 0.0, "pred": "12345"}
