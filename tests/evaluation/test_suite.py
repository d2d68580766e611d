"""A suite is checked as a whole before a model is loaded; every fault is named by key, or by file and line."""

import json

import pytest

from megatron_patch.errors import UserError
from megatron_patch.evaluation.suite import read_suite
from tests.evaluation.models import write_suite

GOOD_ROW = {"messages": [{"role": "user", "content": "q"}], "answer": "a"}


def test_reads_what_was_written(suite):
    read = read_suite(suite)
    assert (read.name, [task.name for task in read.tasks], len(read.held_out.documents)) == (
        "tiny",
        ["echo", "owner"],
        6,
    )
    assert [task.taught_to_base for task in read.tasks] == [True, False]
    assert read.tasks[0].rows[2].answer == "2"
    assert read.tasks[0].rows[2].where.endswith("echo.jsonl:3")
    assert (read.tasks[0].chance, read.held_out.max_length) == (0.1, 48)


def test_limit_keeps_the_first_rows_of_every_file(suite):
    read = read_suite(suite, limit=2)
    assert [row.answer for row in read.tasks[1].rows] == ["0", "1"]
    assert len(read.held_out.documents) == 2
    with pytest.raises(UserError, match="--limit must be 1 or more: 0"):
        read_suite(suite, limit=0)


def _suite(tmp_path, **values):
    path = write_suite(tmp_path / "suite")
    content = json.loads((path / "suite.json").read_text()) | values
    (path / "suite.json").write_text(json.dumps({k: v for k, v in content.items() if v != "REMOVE"}))
    return path


TASK = {"name": "echo", "file": "echo.jsonl", "metric": "exact_match", "chance": 0.1, "taught_to_base": True}
HELD_OUT = {"file": "heldout.jsonl", "text_key": "text", "max_length": 48}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schema": 2}, "schema must be 1: 2"),
        ({"schema": True}, "schema must be 1: True"),
        ({"name": " "}, "name must be a string that is not blank"),
        ({"tasks": []}, "at least one task"),
        ({"tasks": "REMOVE"}, "no key 'tasks'"),
        ({"perplexity": "REMOVE"}, "no key 'perplexity'"),
        ({"perplexty": HELD_OUT}, "unknown key 'perplexty'; did you mean 'perplexity'"),
        ({"tasks": ["echo"]}, "task 1: must be an object, not a string"),
        ({"tasks": [TASK, TASK]}, "task names must differ: echo"),
        ({"tasks": [TASK | {"metric": "accuracy"}]}, r"task 1 \(echo\): metric must be 'exact_match': 'accuracy'"),
        ({"tasks": [TASK | {"chance": 1}]}, "chance must be a number from 0 to below 1: 1"),
        ({"tasks": [TASK | {"chance": True}]}, "chance must be a number from 0 to below 1: True"),
        ({"tasks": [TASK | {"taught_to_base": "yes"}]}, "taught_to_base must be true or false: 'yes'"),
        ({"tasks": [TASK | {"taught": True}]}, "unknown key 'taught'; did you mean 'taught_to_base'"),
        ({"tasks": [TASK | {"description": 3}]}, "description must be a string, not a number"),
        ({"tasks": [TASK | {"file": "../echo.jsonl"}]}, "file must be a plain name in the suite's directory: '../echo"),
        ({"tasks": [TASK | {"file": "/etc/passwd"}]}, "file must be a plain name"),
        ({"tasks": [TASK | {"file": "none.jsonl"}]}, "none.jsonl' is not a file"),
        ({"tasks": [{k: v for k, v in TASK.items() if k != "chance"}]}, "no key 'chance'"),
        ({"perplexity": HELD_OUT | {"max_length": 1}}, "max_length must be a whole number of 2 or more tokens: 1"),
        ({"perplexity": HELD_OUT | {"max_length": 48.0}}, "max_length must be a whole number"),
        ({"perplexity": HELD_OUT | {"text_key": "body"}}, "heldout.jsonl:1: no key 'body'; it has 'text'"),
    ],
)
def test_refuses_a_malformed_suite_json(tmp_path, values, message):
    with pytest.raises(UserError, match=message):
        read_suite(_suite(tmp_path, **values))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', "bad JSON"),
        ("[1]", "a row must be a JSON object, not a list"),
        (GOOD_ROW | {"answer": " "}, "answer must be a string that is not blank"),
        (GOOD_ROW | {"answer": 7}, "answer must be a string that is not blank: 7"),
        ({"messages": GOOD_ROW["messages"]}, "no key 'answer'"),
        ({"answer": "a"}, "no key 'messages'"),
        (GOOD_ROW | {"messages": []}, "must end with the user's question: they end with nothing"),
        (GOOD_ROW | {"messages": "hi"}, "'messages' must be a list, not a string"),
        (GOOD_ROW | {"messages": [{"role": "robot", "content": ""}]}, "unknown role 'robot'"),
        (GOOD_ROW | {"messages": [{"role": "user"}]}, "no key 'content'"),
        (GOOD_ROW | {"messages": [*GOOD_ROW["messages"], {"role": "assistant", "content": "a"}]}, "with 'assistant'"),
    ],
)
def test_refuses_a_malformed_row_by_its_line(tmp_path, line, message):
    path = write_suite(tmp_path / "suite")
    text = line if isinstance(line, str) else json.dumps(line)
    (path / "owner.jsonl").write_text(f"{json.dumps(GOOD_ROW)}\n\n{text}\n")
    with pytest.raises(UserError, match=message) as caught:
        read_suite(path, limit=1)  # rows beyond the limit are checked too
    assert "owner.jsonl:3" in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_refuses_a_file_without_rows(tmp_path, text):
    path = write_suite(tmp_path / "suite")
    (path / "echo.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"echo\.jsonl"):
        read_suite(path)


@pytest.mark.parametrize("document", [{"text": ""}, {"text": 5}])
def test_refuses_a_bad_document(tmp_path, document):
    path = write_suite(tmp_path / "suite")
    (path / "heldout.jsonl").write_text(json.dumps({"text": "fine"}) + "\n" + json.dumps(document) + "\n")
    with pytest.raises(UserError, match=r"heldout\.jsonl:2: 'text' must be a string that is not empty"):
        read_suite(path)


def test_refuses_what_is_no_suite(tmp_path):
    with pytest.raises(UserError, match=r"a suite is a directory with a suite\.json"):
        read_suite(tmp_path / "nowhere")
    (tmp_path / "suite.json").write_text("{")
    with pytest.raises(UserError, match=r"suite.json must be JSON"):
        read_suite(tmp_path)
    with pytest.raises(UserError, match="a suite is a directory"):
        read_suite(tmp_path / "suite.json")
