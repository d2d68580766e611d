"""lm-eval's own command lines that repeat a run of `evaluate`, to the last digit on the same machine."""

import shlex
from pathlib import Path

from megatron_patch.evaluation.endpoint import NO_LIMIT, Endpoint
from megatron_patch.evaluation.loading import ModelDirectory, implementations
from megatron_patch.evaluation.passes import Work
from megatron_patch.evaluation.scores import SOFTMAX_DTYPE
from megatron_patch.evaluation.sides import Side


def commands(work: Work, tasks: Path, tokenizer: Path, sides: tuple[Side, Side]) -> list[str]:
    """A command for the base and one for the model (two for a server that gives log-probabilities, none for a masked base).

    Args:
        work: what was scored, and how. The batch size decides the last digits, so it is part of the command.
        tasks: where the directory of tasks will stand.
        tokenizer: the directory whose tokenizer a server's prompts are made with.
        sides: base and model.
    """
    lines = []
    for side in sides:
        if isinstance(side, Endpoint):
            groups = [f"{work.files.group}_generate", *([work.files.documents] if side.gives_logprobs else [])]
            lines += [_served(work, tasks, tokenizer, side, group) for group in groups]
        elif isinstance(side, ModelDirectory):
            lines.append(_local(work, tasks, side))
    return lines


def _local(work: Work, tasks: Path, directory: ModelDirectory) -> str:
    arguments = {
        "pretrained": str(directory.path),
        "dtype": str(work.dtype).removeprefix("torch."),
        "softmax_dtype": SOFTMAX_DTYPE,
        **implementations(directory, work.device),
    }
    if directory.dsa_layers:
        arguments["trust_remote_code"] = "True"  # without it, transformers' stock class loads random projections
    return _command(
        "hf", arguments, work.files.group, tasks, ["--batch_size", str(work.batch_size), "--device", str(work.device)]
    )


def _served(work: Work, tasks: Path, tokenizer: Path, server: Endpoint, group: str) -> str:
    arguments = {
        "model": server.model,
        "base_url": server.url,
        "tokenizer_backend": "huggingface",
        "tokenizer": str(tokenizer),
        "max_length": str(NO_LIMIT),
    }
    return _command("local-completions", arguments, group, tasks, ["--batch_size", str(work.batch_size)])


def _command(model: str, arguments: dict[str, str], group: str, tasks: Path, more: list[str]) -> str:
    pairs = ",".join(f"{key}={value}" for key, value in arguments.items())
    words = [
        "lm_eval",
        "run",
        "--model",
        model,
        "--model_args",
        pairs,
        "--tasks",
        group,
        "--include_path",
        str(tasks),
        *more,
    ]
    return "HF_HUB_OFFLINE=1 " + shlex.join(words)
