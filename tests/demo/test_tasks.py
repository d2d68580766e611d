"""The tasks: right answers, no shared instance between suite and training, recall from beyond the selected keys."""

import random

import pytest

from megatron_patch.demo.base_training import BaseTraining, batches, encode_conversation
from megatron_patch.demo.corpus import load_corpus
from megatron_patch.demo.tasks import TASKS, THINGS, conversation, for_suite, suite_row

INDEX_TOPK = 32  # twice the quickstart's
PASSAGES = load_corpus().held_out
BY_NAME = {task.name: task for task in TASKS}


def solve(name: str, material: str, question: str) -> str:
    """The answer by plain Python, from what stands in the conversation."""
    words = material.split("\n")[0].split()
    if name in ("lookup", "following"):
        return f"{question} {words[words.index(question) + 1]}"
    if name == "needle":
        [thing] = [word for word in words if word in THINGS]
        return thing
    if name == "copy":
        return question
    numbers = [int(word) for word in question.split()]
    return str(numbers[0] + 1) if name == "successor" else str(max(numbers))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_answers_are_right_and_unambiguous(task):
    rng = random.Random(0)
    for _ in range(30):
        row = suite_row(task, rng, PASSAGES)
        chat = [*row["messages"], {"role": "assistant", "content": row["answer"]}]
        for messages in (chat, conversation(task, rng, PASSAGES)):
            material, turns = messages[0]["content"], messages[2:]
            for question, answer in zip(turns[::2], turns[1::2]):
                assert answer["content"] == solve(task.name, material, question["content"])
            asked = [turn["content"] for turn in turns[::2]]
            assert len(set(asked)) == len(asked)  # no answer can be read off an earlier turn


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_suite_and_training_share_no_instance(task):
    """A recall task is told apart by its list, another one by each of its questions."""
    rng = random.Random(1)

    def contents(messages):
        if task.recall:
            return [messages[0]["content"].split("\n")[0]]
        return [task.name + message["content"] for message in messages[2::2]]

    scored = [contents(suite_row(task, rng, PASSAGES)["messages"])[-1] for _ in range(100)]
    trained = [content for _ in range(100) for content in contents(conversation(task, rng, PASSAGES))]
    assert all(for_suite(content) for content in scored)
    assert not any(for_suite(content) for content in trained)


@pytest.mark.parametrize("task", [task for task in TASKS if task.recall], ids=lambda task: task.name)
def test_recalled_keys_lie_beyond_the_selected_ones(task, tokenizer):
    """From the token that predicts the answer, both the key and what stands beside it are > 32 tokens back."""
    rng = random.Random(2)
    for _ in range(30):
        row = suite_row(task, rng, PASSAGES)
        ids, _ = encode_conversation(tokenizer, row["messages"])
        material = row["messages"][0]["content"].split("\n")[0]
        if task.name == "needle":  # the passage up to the thing
            material = material[: material.index(f" {row['answer']} ") + 1 + len(row["answer"])]
        listed = tokenizer.encode(f"User: {material}", add_special_tokens=False)
        end_of_list = 1 + len(listed)  # BOS, then the list
        assert ids[1:end_of_list] == listed
        assert len(ids) - end_of_list > INDEX_TOPK


def test_exactly_one_task_is_never_taught_to_the_base():
    assert [task.name for task in TASKS if not task.taught_to_base] == ["needle"]
    assert BY_NAME["needle"].recall and BY_NAME["needle"].sft_weight > 0


def test_the_base_never_sees_the_new_task(tokenizer):
    """Its instruction stands in no batch, although the taught recall task's does."""
    settings = BaseTraining(steps=40, text_rows=1, chat_rows=8, seed=3)
    seen = "".join(tokenizer.decode(row) for tokens, _ in batches(tokenizer, PASSAGES, settings) for row in tokens)
    assert "You say it and its thing." in seen
    assert "Say the thing." not in seen


def test_batches_count_text_and_answers_only(tokenizer):
    settings = BaseTraining(steps=3, text_rows=2, chat_rows=3, length=96)
    shapes = []
    for tokens, counted in batches(tokenizer, PASSAGES, settings):
        shapes.append(tuple(tokens.shape))
        assert counted.shape == (5, tokens.shape[1] - 1)
        assert counted[:2].all() and counted[2:].any() and not counted[2:].all()
    assert shapes == [(5, 97)] * 3
