"""A served model: an OpenAI-compatible completions endpoint (vLLM, SGLang) through lm-eval's `local-completions`.

The server answers the `generate_until` form of the tasks, greedily. Perplexity needs the log-probabilities of a prompt
(`echo` with `logprobs`), which not every server gives; it is asked first, with one short prompt.
"""

import copy
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from megatron_patch.errors import UserError
from megatron_patch.evaluation.scores import quiet

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from transformers import PreTrainedTokenizerBase

PATH = "/v1/completions"
TIMEOUT = 300  # seconds an answer may take; a first request may compile or load
RETRIES = 3
NO_LIMIT = 1 << 30  # tokens: lm-eval would cut a prompt from the left; a server refuses what is too long, and says so


@dataclass(frozen=True)
class Endpoint:
    """A server that answered. `url`: of completions; `model`: the name under which it serves."""

    url: str
    model: str
    gives_logprobs: bool


def completions_url(url: str) -> str:
    """`url` with the path of completions: a server's root and `.../v1` are completed.

    Raises:
        UserError: not an http(s) URL.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that do not close
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"an endpoint must be an http or https URL: {url!r}; e.g. http://localhost:8000{PATH}")
    path = parts.path.rstrip("/")
    if not path.endswith("/completions"):
        path = f"{path}/completions" if path.endswith("/v1") else f"{path}{PATH}"
    if path.endswith("/chat/completions"):
        raise UserError(
            f"an endpoint must be for completions, whose prompts are the suite's own tokens: {url!r} is for chats; give {PATH}"
        )
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def find_endpoint(url: str, model: str | None, prompt: list[int]) -> Endpoint:
    """Ask the server what it serves, for one token, and for the log-probabilities of a prompt.

    Args:
        url: as the user gave it.
        model: the served model's name; None: the only one that the server lists.
        prompt: token ids, at least 2.

    Raises:
        UserError: nothing answers, or not with a completion, or it serves several models and none is named.
    """
    url = completions_url(url)
    model = model or _served_model(url)
    request = {"model": model, "prompt": [prompt], "max_tokens": 1, "temperature": 0}
    check_choices(url, _request("POST", url, json=request), 1)
    try:
        content = _request("POST", url, json={**request, "echo": True, "logprobs": 1})
        gives = len(prompt_logprobs(url, content, [prompt])[0]) == len(prompt) - 1
    except UserError:
        gives = False  # a server that completes but has no `echo`: said in the report
    return Endpoint(url, model, gives)


def check_choices(url: str, content: Any, prompts: int) -> list[dict[str, Any]]:
    """The completions of `prompts` prompts, in their order.

    Raises:
        UserError: the content is not what a completions endpoint answers.
    """
    choices = content.get("choices") if isinstance(content, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise _not_a_completion(url, content, "a list of choices")
    if len(choices) == prompts == 1:
        choices = [{"index": 0, **choices[0]}]
    indices = [choice.get("index") for choice in choices]
    if not all(type(index) is int for index in indices) or sorted(indices) != list(range(prompts)):
        raise _not_a_completion(url, content, f"{prompts} choices, numbered by index")
    if not all(isinstance(choice.get("text"), str) for choice in choices):
        raise _not_a_completion(url, content, "a text in each choice")
    return sorted(choices, key=lambda choice: choice["index"])


def prompt_logprobs(url: str, content: Any, prompts: list[list[int]]) -> list[list[float]]:
    """Log-probability of each prompt's tokens but the first, which no model predicts.

    Raises:
        UserError: the answer does not hold them for exactly the prompts' tokens and one more.
    """
    found = []
    for choice, prompt in zip(check_choices(url, content, len(prompts)), prompts, strict=True):
        logprobs = choice.get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        if not isinstance(values, list) or len(values) != len(prompt) + 1:
            raise _not_a_completion(
                url, content, f"{len(prompt) + 1} token_logprobs for a prompt of {len(prompt)} tokens"
            )
        if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in values[1:]):
            raise _not_a_completion(url, content, "finite token_logprobs")
        found.append([float(value) for value in values[1:-1]])
    return found


def wrap_endpoint(
    endpoint: Endpoint,
    tokenizer: "PreTrainedTokenizerBase",
    batch_size: int,
    progress: Callable[[int], object],
    *,
    trust_remote_code: bool = False,
) -> "LM":
    """lm-eval's `local-completions`, with answers checked before they are read.

    Args:
        endpoint: what `find_endpoint` found.
        tokenizer: the base's: prompts are sent as its tokens.
        batch_size: prompts in a request.
        progress: called with the number of prompts answered after each request.
        trust_remote_code: for the tokenizer, which lm-eval loads again.
    """
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    class CheckedCompletions(LocalCompletionsAPI):
        def model_call(self, messages: Any, *, generate: bool = True, gen_kwargs: Any = None, **_: Any) -> Any:
            payload = self._create_payload(
                self.create_message(messages),
                generate=generate,
                gen_kwargs=copy.deepcopy(
                    gen_kwargs
                ),  # lm-eval takes keys out of it, and gives it again to the next request
                seed=self._seed,
                eos=self.eos_string,
            )
            content = _request("POST", endpoint.url, json=payload)
            if generate:
                choices = check_choices(endpoint.url, content, len(messages))
            else:
                choices = list(map(_choice, range(len(messages)), prompt_logprobs(endpoint.url, content, messages)))
            progress(len(messages))
            return {"choices": choices}

    with quiet():
        return CheckedCompletions(
            model=endpoint.model,
            base_url=endpoint.url,
            tokenizer_backend="huggingface",  # not "auto", which asks the server for a tokenizer
            tokenizer=tokenizer.name_or_path,
            max_length=NO_LIMIT,
            batch_size=batch_size,
            max_retries=RETRIES,
            timeout=TIMEOUT,
            trust_remote_code=trust_remote_code,
        )


def _choice(index: int, values: list[float]) -> dict[str, Any]:
    """As lm-eval reads it: the first token has none, and the one after the prompt is left out. Of documents only the sum
    of log-probabilities is used, so it may believe that every token was the most probable one."""
    values = [0.0, *values, 0.0]
    return {"index": index, "logprobs": {"token_logprobs": values, "top_logprobs": [{"": value} for value in values]}}


def _served_model(url: str) -> str:
    listed = url.removesuffix("completions") + "models"
    content = _request("GET", listed)
    entries = content.get("data") if isinstance(content, dict) else None
    names = (
        [entry["id"] for entry in entries if isinstance(entry, dict) and "id" in entry]
        if isinstance(entries, list)
        else []
    )
    if len(names) != 1:
        what = f"{len(names)} ({', '.join(map(str, names[:5]))})" if names else "none"
        raise UserError(
            f"the endpoint must serve one model, or be told which: {listed} lists {what}; give --endpoint-model NAME, or "
            "--base-endpoint-model NAME where it serves the base"
        )
    return str(names[0])


def _request(method: str, url: str, **options: Any) -> Any:
    """The JSON that the server answers.

    Raises:
        UserError: nobody answers, in time or at all, or the answer is an error or no JSON.
    """
    import requests

    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}  # lm-eval's variable
    try:
        answer = requests.request(method, url, headers=headers, timeout=TIMEOUT, **options)
    except requests.Timeout:
        raise UserError(
            f"an endpoint must answer within {TIMEOUT} s: {url} does not; look at the server's log"
        ) from None
    except requests.RequestException as error:
        reason = str(error).split("Caused by")[-1].strip("() ")[:200]
        raise UserError(
            f"an endpoint must be a running server: {url} does not answer ({reason}); start it, or check the URL"
        ) from None
    if not answer.ok:
        raise UserError(
            f"an endpoint must answer with status 200: {url} says {answer.status_code} {answer.reason}: {answer.text[:200]!r}; "
            "look at the server's log (a key is taken from OPENAI_API_KEY)"
        )
    try:
        return answer.json()
    except requests.JSONDecodeError:
        raise UserError(
            f"an endpoint must answer in JSON: {url} says {answer.text[:80]!r}; give the URL of an OpenAI-compatible server"
        ) from None


def _not_a_completion(url: str, content: Any, wanted: str) -> UserError:
    return UserError(
        f"an endpoint must answer as OpenAI's completions do, with {wanted}: {url} says {str(content)[:120]!r}; give the URL "
        "of such a server (vLLM's or SGLang's /v1/completions)"
    )
