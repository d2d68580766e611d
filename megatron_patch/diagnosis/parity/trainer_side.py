"""The trainer's side: a training checkpoint in megatron-core, recorded with hooks and wrapped methods.

Import only after `devices.activate`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_patch.checkpoint.hf_mapping import HybridMapping, hybrid_mapping
from megatron_patch.checkpoint.load_base import load_base, load_trained
from megatron_patch.checkpoint.manifest import (
    WEIGHTS_FILE,
    TrainingManifest,
    iteration_directory,
    read_manifest,
    require_base,
    verify_files,
)
from megatron_patch.devices.device import Device
from megatron_patch.diagnosis.parity.records import Dump, digest, flat, hook, log_probs_of, shadow
from megatron_patch.errors import UserError
from megatron_patch.io.hashes import directory_identity
from megatron_patch.model.architecture import Architecture, read_architecture
from megatron_patch.model.builder import BuildSettings, build_model, forward_pack
from megatron_patch.model.dsa_attention import DsaSelfAttention
from megatron_patch.model.dsa_state import DsaState
from megatron_patch.model.freeze import freeze_base
from megatron_patch.ops.backends import choose_backend
from megatron_patch.ops.reference import index_scores

Recorder = Callable[[str, Tensor], None]


@dataclass
class Trainer:
    """A model as the training loop builds it, and what it was read from."""

    model: GPTModel
    state: DsaState
    arch: Architecture
    manifest: TrainingManifest
    directory: Path
    device: Device

    @property
    def mapping(self) -> HybridMapping:
        return hybrid_mapping(self.arch, self.manifest.layer_pattern)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor, bool]]:
        """(Hugging Face name, value, whether it trains) of every parameter."""
        for name, parameter in self.model.named_parameters():
            for key, view in self.mapping.to_hf(name, parameter.detach()).items():
                yield key, view, parameter.requires_grad


def load_trainer(
    checkpoint: Path,
    device: Device,
    *,
    base: Path | None = None,
    iteration: int | None = None,
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> Trainer:
    """Build the model of a --save directory as training would.

    Args:
        checkpoint: the --save directory.
        device: activated, torch.distributed started.
        base: where the base is now; None: where the manifest says.
        iteration: None: the latest.
        dtype: of parameters and activations.
        backend: of the DSA op.

    Raises:
        UserError: the checkpoint is damaged, or `base` is not its base.
    """
    directory = iteration_directory(checkpoint, iteration)
    manifest = read_manifest(directory)
    verify_files(directory, manifest, only=(WEIGHTS_FILE,))
    base = base or Path(manifest.base.path)
    arch = read_architecture(base)
    require_base(manifest, base, directory_identity(base))
    try:
        op = choose_backend(backend, device.torch_device.type)
    except ValueError as error:
        raise UserError(f"--dsa-backend: {error}; use auto") from None
    pattern = manifest.layer_pattern
    model, state = build_model(arch, pattern, manifest.dsa, BuildSettings(dtype=dtype), op)
    load_base(model, base, arch, pattern)
    freeze_base(model, pattern)
    load_trained(model, directory / WEIGHTS_FILE)
    model.to(device.torch_device).eval()
    return Trainer(model, state, arch, manifest, directory, device)


def run_trainer(trainer: Trainer, tokens: Tensor, cu_seqlens: Tensor) -> dict[str, Tensor]:
    """`log_probs` and `predicts` of a pack."""
    with torch.no_grad():
        return log_probs_of(_forward(trainer, tokens, cu_seqlens), tokens, cu_seqlens)


def dump_trainer(
    trainer: Trainer,
    tokens: Tensor,
    cu_seqlens: Tensor,
    environment: dict[str, str],
    dtype: str,
    as_stored: Callable[[str, Tensor], Tensor] = lambda _name, value: value,
) -> Dump:
    """Run a pack and record it; the self-test runs it once more, with gradients, and part of it again in the backward pass.

    Args:
        as_stored: (Hugging Face name, value) -> the value as the other side stores it, of which the digest is taken.
    """
    tensors: dict[str, Tensor] = {"tokens": tokens, "cu_seqlens": cu_seqlens}
    with recorded(trainer, lambda name, value: tensors.__setitem__(name, value)):
        found = run_trainer(trainer, tokens, cu_seqlens)
    tensors |= found
    dump = Dump(
        side="trainer",
        source=str(trainer.directory),
        dtype=dtype,
        topk=trainer.manifest.dsa.index_topk,
        environment=environment,
        tensors=tensors,
        weights={key: digest(as_stored(key, view)) for key, view, _ in trainer.hf_tensors()},
        trained=[key for key, _, trains in trainer.hf_tensors() if trains],
    )
    dump.self_test = self_test(trainer, dump)
    return dump


def _forward(trainer: Trainer, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    place = trainer.device.torch_device
    return forward_pack(trainer.model, tokens.to(place), cu_seqlens.int().to(place))


@contextlib.contextmanager
def recorded(trainer: Trainer, record: Recorder) -> Iterator[None]:
    """While the block runs, everything that `records` names goes to `record`, on the CPU."""

    def keep(name: str, value: Tensor) -> None:
        record(name, value.detach().to("cpu", copy=True))  # megatron-core adds residuals in place

    with contextlib.ExitStack() as stack:
        for number, layer in enumerate(trainer.model.decoder.layers):
            prefix = f"layers.{number}."
            _hook_layer(stack, layer, prefix, keep)
            if isinstance(layer.self_attention, DsaSelfAttention):
                _record_selection(stack, layer.self_attention, prefix, keep)
            if hasattr(layer.mlp, "router"):
                _record_moe(stack, layer.mlp, prefix, keep)
            else:
                hook(stack, layer.mlp, lambda out, p=prefix: keep(p + "mlp", flat(out[0])))
        yield


def _hook_layer(stack: contextlib.ExitStack, layer: torch.nn.Module, prefix: str, keep: Recorder) -> None:
    def before(_module, args, kwargs):
        keep(prefix + "input", flat(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]))

    stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
    hook(stack, layer.input_layernorm, lambda out: keep(prefix + "norm", flat(out)))
    hook(stack, layer.self_attention, lambda out: keep(prefix + "attention", flat(out[0])))
    hook(stack, layer.pre_mlp_layernorm, lambda out: keep(prefix + "post_norm", flat(out)))
    hook(stack, layer, lambda out: keep(prefix + "output", flat(out[0])))


def _record_selection(stack: contextlib.ExitStack, attention: DsaSelfAttention, prefix: str, keep: Recorder) -> None:
    backend = attention.backend

    def recording(op):
        """`op` with its selection and scores kept; the last four tensors of its arguments are the indexer's and cu_seqlens."""

        def call(*tensors, **options):
            result = op(*tensors, **options)
            keep(prefix + "indexer", index_scores(*(x.detach() for x in tensors[-4:-1])))
            keep(prefix + "indices", result.indices)
            return result

        return op and call

    ops = {name: recording(getattr(backend, name)) for name in ("attention", "absorbed")}
    shadow(stack, attention, "backend", dataclasses.replace(backend, **ops))


def _record_moe(stack: contextlib.ExitStack, moe: torch.nn.Module, prefix: str, keep: Recorder) -> None:
    postprocess = moe.postprocess

    def split(output: Tensor, shared: Tensor | None) -> Tensor:
        routed = postprocess(output, None)  # what the experts give, before the shared experts are added
        keep(prefix + "experts", flat(routed))
        return routed if shared is None else routed + shared

    shadow(stack, moe, "postprocess", split)
    hook(stack, moe.router, lambda out: keep(prefix + "router", (out[0] * out[1]).float()))
    hook(stack, moe.shared_experts, lambda out: keep(prefix + "shared", flat(out)))


def self_test(trainer: Trainer, dump: Dump) -> dict[str, float | bool]:
    """The same weights and tokens with gradients on and the DSA layers recomputed: log-probs and selections must not change.

    A selection that differs between the passes gives a gradient of another function (one public RL run had gradient
    norms of 9 to 392 where 0.12 is normal).
    """
    seen: dict[str, list[Tensor]] = {}
    layers = [layer for layer in trainer.model.decoder.layers if isinstance(layer.self_attention, DsaSelfAttention)]
    before = [layer.recompute for layer in layers]
    for layer in layers:
        layer.recompute = True
    try:
        with recorded(trainer, lambda name, value: seen.setdefault(name, []).append(value)), torch.enable_grad():
            logits = _forward(trainer, dump.tokens, dump.cu_seqlens)
            log_probs_sum(logits, dump).backward()
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.recompute = value
        trainer.model.zero_grad(set_to_none=True)
    again = log_probs_of(logits.detach(), dump.tokens, dump.cu_seqlens)["log_probs"]
    first = {name: value for name, value in dump.tensors.items() if name.endswith(".indices")}
    return {
        "logprob_max": float((again - dump.tensors["log_probs"]).abs().max()),
        "indices_equal": all(torch.equal(seen[name][0], value) for name, value in first.items()),
        "recompute_indices_equal": all(torch.equal(seen[name][-1], value) for name, value in first.items()),
        "recomputed_layers": sum(len(seen[name]) > 1 for name in first),
    }


def log_probs_sum(logits: Tensor, dump: Dump) -> Tensor:
    """Scalar: the mean negative log-probability of the next tokens."""
    predicts = dump.tensors["predicts"].to(logits.device)
    targets = dump.tokens.roll(-1).to(logits.device)
    return torch.nn.functional.cross_entropy(logits[predicts].float(), targets[predicts])
