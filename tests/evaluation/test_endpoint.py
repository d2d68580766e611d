"""A served model gets the scores that the same model gets in process; a bad server ends in one line and exit code 2."""

import json
import re
import socket

import pytest

from megatron_patch import cli, errors
from megatron_patch.errors import UserError
from megatron_patch.evaluation import endpoint
from megatron_patch.evaluation.endpoint import check_choices, completions_url, prompt_logprobs
from tests.evaluation.completions_server import Broken, Served, serve


def _evaluate(talking, output, url, *more):
    base, _, suite = talking
    argv = [
        "evaluate",
        "--base",
        base,
        "--endpoint",
        url,
        "--suite",
        suite,
        "--output",
        output,
        "--device",
        "cpu",
        *more,
    ]
    return errors.run(lambda: cli.dispatch([str(word) for word in argv]))


@pytest.fixture(scope="module")
def served(talking, tmp_path_factory):
    """(recovery.json, recovery.md, requests, URL) of the talking export behind a server."""
    server, output = Served(talking[1]), tmp_path_factory.mktemp("served") / "out"
    with serve(server) as url:
        assert _evaluate(talking, output, f"{url}/v1/completions") == 0
    return (
        json.loads((output / "recovery.json").read_text()),
        (output / "recovery.md").read_text(),
        server.requests,
        url,
    )


def test_scores_are_those_of_the_model_in_process(served, talking_evaluation):
    got, _, _, _ = served
    expected = json.loads((talking_evaluation / "recovery.json").read_text())
    for ours, theirs in zip(got["tasks"], expected["tasks"], strict=True):
        for key in ("name", "n", "base", "model", "stderr", "ratio", "counted", "gain_over_base", "gain_stderr"):
            assert ours[key] == theirs[key], key
        assert 0 < ours["model"] < 1
    assert got["perplexity"]["base"] == expected["perplexity"]["base"]
    for key in ("model", "loss_difference", "loss_difference_stderr"):
        assert got["perplexity"][key] == pytest.approx(expected["perplexity"][key], rel=1e-4)  # one prompt at a time


def test_what_a_server_does_not_show_is_null_and_named(served):
    got, page, _, url = served
    assert got["participation"] is None
    assert all(task["bypassed"] is None and task["scrambled_indices"] is None for task in got["tasks"])
    assert got["model"] == {"path": f"{url}/v1/completions", "sha256": None, "served_name": "proxy"}
    assert got["summary"]["not_measured"] == ["bypassed", "scrambled_indices", "participation"]
    assert "(scores alone; not measured: bypassed, scrambled_indices, participation)" in page
    assert "served as proxy" in page and "local-completions" in page
    assert got["warnings"] == []


def test_prompts_are_the_suites_own_tokens_and_greedy(served, talking):
    _, _, requests, _ = served
    written = [request for request in requests if "stop" in request]
    assert written and all(request["temperature"] == 0 and request["stop"] == ["<eos>"] for request in written)
    prompts = [prompt for request in written for prompt in request["prompt"]]
    assert len(prompts) == 60 and all(prompt.count(1) == 1 and prompt[0] == 1 for prompt in prompts)
    assert max(len(request["prompt"]) for request in written) == 16  # --batch-size


def test_a_server_without_echo_gives_no_perplexity(talking, tmp_path, capsys):
    edit = Served(talking[1], name="a/b", gives_logprobs=False)
    with serve(edit) as url:
        assert _evaluate(talking, tmp_path / "out", url, "--endpoint-model", "a/b", "--limit", "2") == 0
    got = json.loads((tmp_path / "out" / "recovery.json").read_text())
    assert got["perplexity"]["model"] is None and got["perplexity"]["base"] > 0
    assert any("perplexity is not measured" in warning for warning in got["warnings"])
    assert "model not measured" in capsys.readouterr().out
    assert len(got["lm_eval"]["commands"]) == 2  # none for the documents


def _fails(talking, output, url, capsys, *more):
    """The one line on stderr, the progress bars aside."""
    code = _evaluate(talking, output, url, *more)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert code == 2 and len(lines) == 1 and not output.exists()
    return lines[0]


def test_nobody_listens(talking, tmp_path, capsys):
    with socket.socket() as silent:  # bound, so that nobody else takes the port and answers
        silent.bind(("127.0.0.1", 0))
        line = _fails(talking, tmp_path / "out", f"http://127.0.0.1:{silent.getsockname()[1]}", capsys)
    assert "an endpoint must be a running server" in line and "Connection refused" in line


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (Broken(500, "out of\nmemory"), "must answer with status 200: .* says 500 .*out of"),
        (Broken(401, ""), "says 401 .*OPENAI_API_KEY"),
        (Broken(200, "<html>hello</html>"), "must answer in JSON: .* says '<html>hello"),
        (Broken(200, ""), "must answer in JSON"),
        (Broken(200, "[]"), "must answer as OpenAI's completions do"),
        (Broken(200, '{"choices": []}'), "with 1 choices, numbered by index"),
        (Broken(200, '{"choices": [{"index": 0, "text": null}]}'), "with a text in each choice"),
        (Broken(200, '{"choices": "none"}'), "with a list of choices"),
        (Broken(200, "", models={"data": [{"id": "a"}, {"id": "b"}]}), r"lists 2 \(a, b\); give --endpoint-model NAME"),
        (Broken(200, "", models={"data": []}), "lists none; give --endpoint-model NAME"),
        (Broken(200, "", models=["a"]), "lists none"),
    ],
)
def test_bad_servers(talking, tmp_path, capsys, server, message):
    with serve(server) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint, "RETRIES", 1)
        line = _fails(talking, tmp_path / "out", url, capsys)
    assert re.search(message, line), line


@pytest.mark.parametrize(("status", "body"), [(503, "busy"), (200, "garbage"), (200, '{"choices": [{"index": 0}]}')])
def test_a_server_that_breaks_midway(talking, tmp_path, capsys, monkeypatch, status, body):
    monkeypatch.setattr(endpoint, "RETRIES", 1)
    with serve(Broken(status, body, good=3)) as url:
        assert "error: an endpoint must answer" in _fails(talking, tmp_path / "out", url, capsys, "--batch-size", "4")


def test_a_server_that_does_not_answer_in_time(talking, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(endpoint, "TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "must answer within 0.3 s" in _fails(talking, tmp_path / "out", url, capsys)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:8000", "http://h:8000/v1/completions"),
        ("http://h:8000/", "http://h:8000/v1/completions"),
        ("https://h/v1/", "https://h/v1/completions"),
        ("https://h/proxy/v1/completions", "https://h/proxy/v1/completions"),
    ],
)
def test_urls_are_completed(url, expected):
    assert completions_url(url) == expected


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "", "http://", "http://[::1", "file:///etc/passwd"])
def test_refuses_what_is_no_url(url):
    with pytest.raises(UserError, match="an endpoint must be an http or https URL"):
        completions_url(url)


def test_refuses_chat_completions():
    with pytest.raises(UserError, match="is for chats"):
        completions_url("http://h/v1/chat/completions")


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {},
        {"token_logprobs": [None, -1.0]},
        {"token_logprobs": [None, -1.0, None, -2.0]},
        {"token_logprobs": [None, -1.0, float("nan"), -2.0]},
        {"token_logprobs": [None, -1.0, "x", -2.0]},
    ],
)
def test_log_probabilities_must_be_of_every_token_of_the_prompt(logprobs):
    with pytest.raises(UserError, match="token_logprobs"):
        prompt_logprobs("u", {"choices": [{"text": "", "logprobs": logprobs}]}, [[1, 2, 3]])


def test_choices_come_by_index():
    content = {"choices": [{"index": 1, "text": "b"}, {"index": 0, "text": "a"}]}
    assert [choice["text"] for choice in check_choices("u", content, 2)] == ["a", "b"]
    for indices in ((0, 0), (1, 2), ("0", "1"), (True, False)):
        broken = {"choices": [{"index": index, "text": ""} for index in indices]}
        with pytest.raises(UserError, match="numbered by index"):
            check_choices("u", broken, 2)
