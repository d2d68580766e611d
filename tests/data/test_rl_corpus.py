"""Questions and answers for GRPO: what is kept, what is dropped, and that the answers are right."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from megatron_patch.data.rl_corpus import RlCorpusSettings, prepare_rl
from megatron_patch.errors import UserError
from megatron_patch.verl.rewards import compute_score

ROOT = Path(__file__).parents[2]


def rows(path: Path) -> list[dict]:
    return parquet.read_table(path).to_pylist()


def write(path: Path, *content: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(path)


def test_arithmetic_is_right_distinct_and_split_by_content(tmp_path):
    meta = prepare_rl(RlCorpusSettings(output=str(tmp_path / "a"), rows=300, validation_share=0.3))
    train, held_out = rows(tmp_path / "a" / "train.parquet"), rows(tmp_path / "a" / "validation.parquet")
    assert (meta["training"], meta["validation"]) == (len(train), len(held_out)) and len(train) + len(held_out) == 300
    assert 50 < len(held_out) < 130
    questions = [row["prompt"][0]["content"] for row in train + held_out]
    assert len(set(questions)) == 300
    for question, row in zip(questions, train + held_out, strict=True):
        expression = re.search(r"What is (\d+ [+-] \d+)\?", question).group(1)
        answer = row["reward_model"]["ground_truth"]
        assert answer == str(eval(expression)) and question.endswith("Answer: <number>")
        assert compute_score(row["data_source"], f"Answer: {answer}", answer)["score"] == 1
    assert train[3]["extra_info"] == {"split": "train", "index": 3} and train[3]["reward_model"]["style"] == "rule"


def test_the_same_seed_gives_the_same_files(tmp_path):
    for name in ("a", "b"):
        prepare_rl(RlCorpusSettings(output=str(tmp_path / name), rows=50, validation_share=0.3))
    assert (tmp_path / "a" / "train.parquet").read_bytes() == (tmp_path / "b" / "train.parquet").read_bytes()
    prepare_rl(RlCorpusSettings(output=str(tmp_path / "c"), rows=50, validation_share=0.3, seed=5))
    assert rows(tmp_path / "a" / "train.parquet") != rows(tmp_path / "c" / "train.parquet")


def test_rows_of_files_keep_their_turns_and_every_drop_is_counted(tmp_path):
    chat = [
        {"role": "user", "content": "Words: a b"},
        {"role": "assistant", "content": "Ready"},
        {"role": "user", "content": "a"},
    ]
    source = write(
        tmp_path / "q.jsonl",
        *({"question": f"Word {i}?", "answer": f"word {i}"} for i in range(20)),
        {"messages": chat, "answer": "a b"},
        {"question": "Word 3?", "answer": "word 3"},  # again
        {"question": "No answer?"},
        {"question": "Empty?", "answer": "  "},
        {"messages": chat[:2], "answer": "x"},
    )
    meta = prepare_rl(RlCorpusSettings(output=str(tmp_path / "o"), input=[source], validation_share=0.3))
    assert meta["rows"] == 25 and meta["training"] + meta["validation"] == 21 and meta["data_source"] == "upcycle/exact"
    assert sorted(meta["dropped"].values()) == [1, 1, 2]
    kept = rows(tmp_path / "o" / "train.parquet") + rows(tmp_path / "o" / "validation.parquet")
    assert [row["prompt"] for row in kept if len(row["prompt"]) > 1] == [chat]
    answers = rows(tmp_path / "o" / "sft.parquet")
    assert len(answers) == meta["training"] and answers[0]["messages"][-1]["role"] == "assistant"


def test_numbers_are_asked_for_in_the_form_that_is_scored(tmp_path):
    source = write(
        tmp_path / "q.jsonl", *({"question": f"{i}?", "answer": i} for i in range(20)), {"question": "?", "answer": "x"}
    )
    meta = prepare_rl(
        RlCorpusSettings(output=str(tmp_path / "o"), input=[source], answer="number", validation_share=0.3)
    )
    assert meta["dropped"] == {"'answer' is not a number": 1}
    row = rows(tmp_path / "o" / "train.parquet")[0]
    assert row["prompt"][0]["content"].endswith("Answer: <number>") and row["data_source"] == "upcycle/number"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rows": 1}, "--rows must be at least 2"),
        ({"digits": 0}, "--digits must be 1 to 9"),
        ({"digits": 1, "rows": 181}, "--rows must leave questions to draw"),
        ({"validation_share": 1.0}, "--validation-share must lie between 0 and 1"),
        ({"rows": 2, "validation_share": 0.0001}, "there must be questions for validation"),
        ({"input": ["absent.jsonl"]}, "input files must exist"),
    ],
)
def test_refusals(tmp_path, settings, message):
    with pytest.raises(UserError, match=re.escape(message)):
        prepare_rl(RlCorpusSettings(output=str(tmp_path / "o"), **settings))
    assert not (tmp_path / "o").exists()


def test_strict_stops_at_the_first_drop(tmp_path):
    source = write(tmp_path / "q.jsonl", {"question": "One?", "answer": "1"}, {"question": "Two?"})
    with pytest.raises(UserError, match=r"q.jsonl:2: no 'answer'"):
        prepare_rl(RlCorpusSettings(output=str(tmp_path / "o"), input=[source], strict=True))


def test_the_script_ends_with_one_line_and_2(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "data" / "prepare_rl.py", "--output", tmp_path / "o", "--rows", "0"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2 and done.stderr == "error: --rows must be at least 2: 0; give the number of questions\n"
