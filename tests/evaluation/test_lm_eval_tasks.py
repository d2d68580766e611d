"""The directory of tasks: complete, movable, without a network; names that lm-eval can tell apart."""

import json
from dataclasses import replace

import pytest
from lm_eval.tasks import TaskManager

from megatron_patch.data.tokenizer import load_tokenizer
from megatron_patch.errors import UserError
from megatron_patch.evaluation.encode import encode_documents, encode_rows
from megatron_patch.evaluation.lm_eval_tasks import write_lm_eval_tasks
from megatron_patch.evaluation.suite import read_suite


@pytest.fixture
def write(tiny_base, suite, tmp_path):
    """Write a suite, changed by the argument, into a new directory; returns (suite, encoded tasks, names)."""
    tokenizer = load_tokenizer(tiny_base)

    def written(change=lambda read: read):
        read = change(read_suite(suite))
        tasks = [encode_rows(tokenizer, task.rows) for task in read.tasks]
        documents = encode_documents(tokenizer, read.held_out)
        directory = tmp_path / "written"
        directory.mkdir()
        return read, tasks, write_lm_eval_tasks(directory, read, tasks, documents, tokenizer.eos_token)

    return written


def test_lm_eval_reads_every_row_as_it_was_encoded(write, tmp_path):
    _, tasks, names = write()
    names.directory.rename(tmp_path / "moved")  # nothing in it names its place
    manager = TaskManager(include_path=str(tmp_path / "moved"), include_defaults=False)
    assert manager.all_groups == ["tiny", "tiny_generate"]
    assert manager.all_subtasks == sorted([*names.exact, *names.generated, names.documents])
    loaded = manager.load(["tiny", "tiny_generate"])["tasks"]
    for name, generated, examples in zip(names.exact, names.generated, tasks, strict=True):
        for task in (loaded[name], loaded[generated]):
            task.build_all_requests()
            assert [request.args[0] for request in task.instances] == [example.context for example in examples]
        asked = [request.args[1] for request in loaded[name].instances]
        assert asked == [example.continuation for example in examples]
        assert all(text.endswith("<eos>") for text in asked)
        settings = loaded[generated].instances[0].args[1]
        assert settings["until"] == ["<eos>"] and not settings["do_sample"]
        assert settings["max_gen_toks"] > max(len(example.ids) - example.start for example in examples)
    loaded["tiny_heldout"].build_all_requests()
    assert {request.args[0] for request in loaded["tiny_heldout"].instances} == {"<bos>"}


def test_rows_that_a_reader_could_take_for_something_else(write, tiny_base):
    """Jinja in a question, a line separator of Unicode, an answer in brackets, a description over two lines."""

    def change(read):
        task = read.tasks[0]
        first = replace(
            task.rows[0],
            messages=[{"role": "user", "content": "{{ 7*7 }} {% raw %}\u2028\n# 2020-01-01"}],
            answer="[1, 2]",
        )
        return replace(read, tasks=[replace(task, rows=[first], description="one\ntask: two")])

    _, (examples,), names = write(change)
    manager = TaskManager(include_path=str(names.directory), include_defaults=False)
    task = manager.load(names.exact)["tasks"][names.exact[0]]
    task.build_all_requests()
    assert task.instances[0].args == (examples[0].context, " [1, 2]<eos>")
    assert "{{ 7*7 }} {% raw %}\u2028\n# 2020-01-01" in examples[0].context


def test_names_become_what_a_command_line_can_carry(write):
    def change(read):
        return replace(read, name="my suite,1", tasks=[replace(read.tasks[0], name="a/b *")])

    _, _, names = write(change)
    assert (names.group, names.exact, names.documents) == ("my_suite_1", ["my_suite_1_a_b__"], "my_suite_1_heldout")
    assert json.loads((names.directory / "my_suite_1_a_b__.jsonl").read_text().split("\n")[0])["answer"] == " 0"


@pytest.mark.parametrize("pair", [("a b", "a_b"), ("heldout", "x"), ("a", "a_generate")])
def test_refuses_names_that_become_the_same(write, pair):
    def change(read):
        return replace(read, tasks=[replace(task, name=name) for task, name in zip(read.tasks, pair, strict=True)])

    with pytest.raises(UserError, match="lm-eval's names of a suite's tasks must differ: tiny_"):
        write(change)
