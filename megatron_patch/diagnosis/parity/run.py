"""`dsa-upcycle parity run | dump | diff`."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_patch.checkpoint.manifest import iteration_directory, read_manifest
from megatron_patch.devices.device import inference_device
from megatron_patch.diagnosis.parity import pages
from megatron_patch.diagnosis.parity.ablations import ablations
from megatron_patch.diagnosis.parity.checkpoint_side import dump_checkpoint
from megatron_patch.diagnosis.parity.parity import FAIL, examine, finite
from megatron_patch.diagnosis.parity.records import DTYPES, Dump, load_dump
from megatron_patch.diagnosis.parity.rollout import load_rollout, rollout_tokens
from megatron_patch.diagnosis.parity.text import read_pack, token_texts
from megatron_patch.diagnosis.parity.weights_reader import read_shape
from megatron_patch.errors import EXIT_OK, EXIT_USER, UserError
from megatron_patch.evaluation.loading import inspect_directory, load_model
from megatron_patch.io.publish import atomic_directory, atomic_write_json, atomic_write_text, require_empty
from megatron_patch.io.safetensors_dir import SafetensorsDir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from megatron_patch.diagnosis.parity.trainer_side import Trainer

REPORT = "parity.json"


@dataclass(frozen=True)
class How:
    """How a side runs: `dtype` "float32" or "bfloat16", `device` None for what is there, the DSA op's `backend`."""

    dtype: str
    device: str | None = None
    backend: str = "auto"


@dataclass(frozen=True)
class Tokens:
    """Where the tokens come from: a text file, or a dump's own."""

    text: Path | None
    seq_length: int | None
    documents: int = 1
    text_key: str = "text"
    of: Path | None = None

    def read(self, directory: Path) -> tuple[Tensor, Tensor]:
        """(tokens, cu_seqlens), whose ids the model in `directory` knows; its tokenizer reads text."""
        tokens, bounds = self._read(directory)
        size = read_shape(directory).vocabulary
        if int(tokens.min()) < 0 or int(tokens.max()) >= size:
            raise UserError(
                f"token ids must be from 0 to {size - 1}, the model's vocabulary: {self.of or self.text} has {int(tokens.min())} to "
                f"{int(tokens.max())}; give a sequence of this model's tokenizer, without padding"
            )
        return tokens, bounds

    def _read(self, tokenizer_directory: Path) -> tuple[Tensor, Tensor]:
        if (self.text is None) == (self.of is None):
            raise UserError("tokens come from one source: give --text FILE with --seq-length N, or --tokens-of DUMP")
        if self.of is not None:
            if not self.of.is_dir():
                return rollout_tokens(self.of)
            other = load_dump(self.of)
            return other.tokens, other.cu_seqlens
        if self.seq_length is None:
            raise UserError("--text needs --seq-length N, the tokens to read: longer than top-k, or the indexer is not tested")
        pack = read_pack(self.text, tokenizer_directory, self.seq_length, self.documents, self.text_key)
        return pack.tokens, pack.cu_seqlens


def run(
    checkpoint: Path,
    hf: Path,
    tokens: Tokens,
    output: Path,
    *,
    base: Path | None,
    iteration: int | None,
    how: How,
    json_file: Path | None = None,
) -> int:
    """Trainer against checkpoint, with ablations. Returns 0 (pass, not tested) or 2 (fail).

    Raises:
        UserError: an argument is wrong, or one of the two cannot be loaded.
    """
    require_empty(output)
    ids, bounds = tokens.read(hf)
    trainer, source = _load_trainer(checkpoint, base, iteration, how), SafetensorsDir(hf)

    def as_stored(name: str, value: Tensor) -> Tensor:
        """In the coarser of the directory's dtype and the run's: fp32 weights in a bf16 directory are rounded, not wrong."""
        return value.to(_coarser(source.dtype(name), DTYPES[how.dtype])) if name in source else value

    a = _dump_trainer(trainer, ids, bounds, how, as_stored)
    model = _load_checkpoint(hf, how)
    b = _dump_checkpoint(model, hf, ids, bounds, how)
    found = examine(a, b, hf, texts=token_texts(ids, hf), max_abs=_largest_gap(trainer, source))
    fp32 = None if how.dtype == "float32" else _fp32_gap(checkpoint, hf, base, iteration, how, ids, bounds)
    found.report["ablations"] = finite(ablations(a, b, model, fp32))
    return _publish(found.report, output, json_file)


def dump(
    output: Path,
    tokens: Tokens,
    *,
    checkpoint: Path | None,
    hf: Path | None,
    base: Path | None,
    iteration: int | None,
    how: How,
) -> int:
    """One side, to be compared on another machine."""
    require_empty(output)
    if (checkpoint is None) == (hf is None):
        raise UserError("a dump is of one side: give --checkpoint SAVE or --hf DIR")
    if checkpoint is not None:
        ids, bounds = tokens.read(base or Path(read_manifest(iteration_directory(checkpoint, iteration)).base.path))
        trainer = _load_trainer(checkpoint, base, iteration, how)
        found = _dump_trainer(trainer, ids, bounds, how)
    else:
        ids, bounds = tokens.read(hf)
        found = _dump_checkpoint(_load_checkpoint(hf, how), hf, ids, bounds, how)
    found.save(output)
    size = sum(item.stat().st_size for item in output.iterdir())
    print(f"dumped {len(found.tokens)} tokens of the {found.side} ({found.source}) to {output}: {size / 1e6:.1f} MB")
    return EXIT_OK


def diff(
    a: Path, b: Path, output: Path, *, hf: Path | None, row: int = 0, json_file: Path | None = None
) -> int:
    """Two dumps, or a dump and a rollout. With `hf` every module is judged and known faults are looked for."""
    require_empty(output)
    first, second = (_load_side(path, hf, row) for path in (a, b))
    if hf is not None:
        _check_model(first, second, hf)
    if first.side == second.side:
        first.side, second.side = f"{first.side} A", f"{second.side} B"
    texts = token_texts(first.tokens, hf) if hf is not None else None
    return _publish(examine(first, second, hf, texts=texts).report, output, json_file)


def _check_model(first: Dump, second: Dump, hf: Path) -> None:
    """The layers that were recorded are those of the directory."""
    layers = read_shape(hf).layers
    for dump in (first, second):
        if dump.side.startswith("rollout"):
            continue
        if dump.layers != list(range(layers)):
            raise UserError(
                f"--hf must be of the model that was dumped: {dump.source} has {len(dump.layers)} layers, {hf} has {layers}; give the export"
            )


def _load_side(path: Path, hf: Path | None, row: int) -> Dump:
    if path.is_dir():
        return load_dump(path)
    if hf is None:
        raise UserError(f"a rollout needs the model that it is of: {path} is a file; add --hf DIR")
    return load_rollout(path, read_shape(hf), row)


def _load_trainer(checkpoint: Path, base: Path | None, iteration: int | None, how: How) -> "Trainer":
    from megatron_patch.devices.device import activate, initialize_distributed

    device = activate(how.device)  # before megatron-core is imported
    initialize_distributed(device, seed=0)
    from megatron_patch.diagnosis.parity.trainer_side import load_trainer

    return load_trainer(checkpoint, device, base=base, iteration=iteration, dtype=DTYPES[how.dtype], backend=how.backend)


def _dump_trainer(trainer: "Trainer", ids: Tensor, bounds: Tensor, how: How, *as_stored: Callable[[str, Tensor], Tensor]) -> Dump:
    from megatron_patch.diagnosis.parity.trainer_side import dump_trainer

    backend = next(layer.self_attention.backend.name for layer in trainer.model.decoder.layers if hasattr(layer, "recompute"))
    environment = _environment(trainer.device.name, "megatron-core") | {"dsa_backend": backend}
    return dump_trainer(trainer, ids, bounds, environment, how.dtype, *as_stored)


def _load_checkpoint(hf: Path, how: How) -> "PreTrainedModel":
    return load_model(inspect_directory(hf), dtype=DTYPES[how.dtype], device=inference_device(how.device))


def _dump_checkpoint(model: "PreTrainedModel", hf: Path, ids: Tensor, bounds: Tensor, how: How) -> Dump:
    environment = _environment(model.device.type, "transformers")
    topk = read_shape(hf).index_topk
    return dump_checkpoint(model, hf, ids, bounds, topk=topk, environment=environment, dtype=how.dtype)


def _environment(device: str, library: str) -> dict[str, str]:
    return {"device": device, "python": platform.python_version(), "torch": torch.__version__, library: version(library)}


def _coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return a if torch.finfo(a).eps >= torch.finfo(b).eps else b


def _largest_gap(trainer: "Trainer", source: SafetensorsDir) -> float:
    """The largest difference of a trained value between the trainer and the directory."""
    gaps = [
        float((view.cpu().double() - source.load(key).double()).abs().max())
        for key, view, trains in trainer.hf_tensors()
        if trains and key in source and source.shape(key) == tuple(view.shape)
    ]
    return max(gaps, default=0.0)


def _fp32_gap(
    checkpoint: Path, hf: Path, base: Path | None, iteration: int | None, how: How, ids: Tensor, bounds: Tensor
) -> float:
    """Largest difference of log-probs with both sides in fp32."""
    from megatron_patch.diagnosis.parity.checkpoint_side import run_model
    from megatron_patch.diagnosis.parity.trainer_side import run_trainer

    backend = "chunked" if how.backend in ("auto", "npu") else how.backend  # Ascend's operators have no fp32
    wide = How("float32", how.device, backend)
    ours = run_trainer(_load_trainer(checkpoint, base, iteration, wide), ids, bounds)
    theirs = run_model(_load_checkpoint(hf, wide), ids, bounds)
    return float((ours["log_probs"] - theirs["log_probs"]).abs().max())


def _publish(report: dict[str, Any], output: Path, json_file: Path | None) -> int:
    with atomic_directory(output) as folder:
        atomic_write_json(folder / REPORT, report)
        atomic_write_text(folder / pages.PAGE, pages.markdown(report))
        pages.write_figure(report, folder / pages.FIGURE)
    if json_file is not None:
        atomic_write_json(json_file, report)
    for line in pages.console_lines(report):
        print(line)
    print(f"report: {output / pages.PAGE}")
    return EXIT_USER if report["verdict"] == FAIL else EXIT_OK
