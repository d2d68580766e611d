"""A small OpenAI-compatible completions server on a tiny model: real tokens, greedy, `echo` with `logprobs`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch

from megatron_patch.data.tokenizer import load_tokenizer
from megatron_patch.evaluation.loading import inspect_directory, load_model

Answer = tuple[int, str]  # status, body


class Served:
    """What answers: a model, and the requests that came in."""

    def __init__(self, directory: Path, name: str = "proxy", gives_logprobs: bool = True) -> None:
        self.model = load_model(inspect_directory(directory))
        self.tokenizer = load_tokenizer(directory)
        self.name, self.gives_logprobs = name, gives_logprobs
        self.requests: list[dict[str, Any]] = []
        self.lock = Lock()  # the model may be one of a test's own

    def models(self) -> Answer:
        return 200, json.dumps({"object": "list", "data": [{"id": self.name}]})

    def complete(self, request: dict[str, Any]) -> Answer:
        with self.lock, torch.inference_mode():
            self.requests.append(request)
            if request["model"] != self.name:
                return 404, json.dumps({"error": f"no model {request['model']}"})
            if request.get("echo") and not self.gives_logprobs:
                return 400, json.dumps({"error": "echo is not supported"})
            choices = [self._choice(request, index, prompt) for index, prompt in enumerate(request["prompt"])]
            return 200, json.dumps({"choices": choices[::-1]})  # by index, not by place

    def _choice(self, request: dict[str, Any], index: int, prompt: list[int]) -> dict[str, Any]:
        ids = torch.tensor([prompt])
        assert request["temperature"] == 0
        new = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["max_tokens"],
            do_sample=False,
            pad_token_id=0,
        )[0]
        text = self.tokenizer.decode(new[len(prompt) :], skip_special_tokens=True)
        choice = {"index": index, "text": text, "finish_reason": "stop"}
        if request.get("echo"):
            log_p = self.model(new[None], use_cache=False).logits[0].log_softmax(-1)
            values = log_p[:-1].gather(-1, new[1:, None])[:, 0].tolist()
            choice["logprobs"] = {"token_logprobs": [None, *values], "top_logprobs": None}
        return choice


class Broken:
    """A server that answers the list of models, then `status` and `body` to every completion after the first `good`."""

    def __init__(self, status: int, body: str, good: int = 0, models: Any = None) -> None:
        self.status, self.body, self.good = status, body, good
        self.listed = {"data": [{"id": "proxy"}]} if models is None else models

    def models(self) -> Answer:
        return 200, json.dumps(self.listed)

    def complete(self, request: dict[str, Any]) -> Answer:
        self.good -= 1
        if self.good < 0:
            return self.status, self.body
        choices = [{"index": index, "text": "x"} for index in range(len(request["prompt"]))]
        return 200, json.dumps({"choices": choices})


@contextmanager
def serve(served: Served | Broken) -> Iterator[str]:
    """The server's root URL, while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(served.models if self.path == "/v1/models" else lambda: (404, "no such page"))

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            right = self.path == "/v1/completions"
            self._answer((lambda: served.complete(request)) if right else (lambda: (404, "no such page")))

        def _answer(self, make: Callable[[], Answer]) -> None:
            status, body = make()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
