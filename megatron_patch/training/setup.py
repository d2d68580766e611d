"""From settings to a run that is ready to step: every check that can be made before training is made here."""

import contextlib
import os
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_patch.checkpoint.load_base import load_base
from megatron_patch.checkpoint.manifest import Layout
from megatron_patch.checkpoint.save import Identity, Progress, clear_leftovers
from megatron_patch.checkpoint.saver import Saver
from megatron_patch.config import BASE_INDEXERS, TrainSettings
from megatron_patch.data.sampler import micro_batches_per_step
from megatron_patch.devices import ranks
from megatron_patch.devices.device import Device, initialize_distributed
from megatron_patch.errors import UserError
from megatron_patch.io.hashes import directory_identity
from megatron_patch.io.lock import only_writer
from megatron_patch.layout_rules import check_layout
from megatron_patch.model.architecture import Architecture, DsaSettings, read_architecture
from megatron_patch.model.builder import BuildSettings, build_model
from megatron_patch.model.dsa_attention import backend_sizes
from megatron_patch.model.dsa_state import DsaState
from megatron_patch.model.freeze import (
    combined_sha256,
    freeze_all_but_indexers,
    freeze_base,
    frozen_hashes,
    merged_hashes,
)
from megatron_patch.model.initialize import initialize_base_indexers, initialize_dsa_layers
from megatron_patch.model.layer_pattern import DSA, appended_pattern, check_pattern, format_pattern, parse_layer_pattern
from megatron_patch.model.names import local_experts
from megatron_patch.ops.backends import choose_backend
from megatron_patch.planning.flops import FlopsCounter
from megatron_patch.training.checks import (
    check_kind,
    check_launch,
    check_output,
    goes_on,
    mark_start,
    resumed_in_place,
)
from megatron_patch.training.data import INDEX_CACHE, RunData, build_data, removed_on_error
from megatron_patch.training.heldout import HeldoutEvaluation
from megatron_patch.training.metrics import MetricsWriter, NoMetrics
from megatron_patch.training.optimizer import build_optimizer, build_scheduler, wrap_ddp
from megatron_patch.training.output import open_output
from megatron_patch.training.start import choose_start, load_start, restore_training
from megatron_patch.training.step import TrainStep
from megatron_patch.training.trunk_cache import open_trunk


@dataclass
class Run:
    """A run that is ready; see `loop`. `model` is bare, `step` holds its DDP wrapper.

    `experts` are the global numbers of this rank's (None: all), `frozen_here` is the hash of its frozen part alone.
    """

    settings: TrainSettings
    device: Device
    model: GPTModel
    state: DsaState
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    step: TrainStep
    heldout: HeldoutEvaluation
    data: RunData
    micro_batches: int
    metrics: MetricsWriter
    saver: Saver
    identity: Identity
    layout: Layout
    progress: Progress
    experts: range | None
    frozen_here: str


def set_up(settings: TrainSettings, kind: str, device: Device) -> Run:
    """Meet the other ranks; check, build, load, and open the data. A rank that finds a mistake ends all of them.

    Raises:
        UserError: a rule is broken; nothing was written but an empty --save directory.
    """
    torch.manual_seed(settings.steps.seed)
    if settings.precision.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be so; read at its first use
    torch.use_deterministic_algorithms(settings.precision.deterministic)
    check_launch(settings)
    parallel = settings.parallel
    initialize_distributed(
        device,
        settings.steps.seed,
        expert_parallel=parallel.expert_model_parallel_size,
        timeout_minutes=parallel.distributed_timeout_minutes,
    )
    with ranks.agreement():
        again = ranks.is_main() and goes_on(settings.output.save)
    if again := ranks.broadcast(again):
        settings = resumed_in_place(settings)
    with ranks.agreement():
        check_kind(settings, kind)
        if ranks.is_main():
            check_output(settings, kind, again)
            mark_start(settings.output.save)
        arch = read_architecture(settings.model.base_model)
        pattern = layer_pattern(settings, arch)
        dsa = _dsa_settings(settings, arch)
        check_layout(settings.launch(ranks.count(), arch.num_experts))
        if ranks.is_main() and (again or settings.resumes_in_place):
            clear_leftovers(settings.output.save)
    ep = parallel.expert_model_parallel_size
    experts = local_experts(arch.num_experts, ep, parallel_state.get_expert_model_parallel_rank())
    with ranks.agreement():
        model, state = _build(settings, arch, pattern, dsa, device, experts)
    identity, frozen_here = _identity(settings, kind, arch, pattern, dsa, model, experts)
    return _assemble(settings, kind, arch, device, model, state, identity, experts, frozen_here)


def hold_save(settings: TrainSettings) -> contextlib.AbstractContextManager:
    """Rank 0 keeps other runs off --save for as long as this one lasts."""
    save = settings.output.save
    if os.environ.get("RANK", "0") != "0" or (save.exists() and not save.is_dir()):
        return contextlib.nullcontext()
    return only_writer(save, "--save")


def _dsa_settings(settings: TrainSettings, arch: Architecture) -> DsaSettings:
    dsa = DsaSettings(settings.model.index_topk, settings.model.index_n_heads, settings.model.index_head_dim)
    if dsa.index_head_dim < arch.qk_rope_head_dim:
        raise UserError(
            f"--index-head-dim must hold the base's {arch.qk_rope_head_dim} RoPE dimensions: {dsa.index_head_dim}; raise it"
        )
    return dsa


def layer_pattern(settings: TrainSettings, arch: Architecture) -> tuple[str, ...]:
    """--layer-pattern, else --dsa-layers on top of the base; at least one DSA layer, on a MoE base layer."""
    if settings.model.train == BASE_INDEXERS:
        return appended_pattern(arch.num_layers, 0)
    if settings.model.layer_pattern is None:
        pattern = appended_pattern(arch.num_layers, settings.model.dsa_layers)
    else:
        pattern = parse_layer_pattern(settings.model.layer_pattern)
    check_pattern(pattern, arch.num_layers)
    if DSA not in pattern:
        raise UserError(f"something must train: {format_pattern(pattern)} has no dsa layer; append ,dsa*2")
    if not arch.is_moe(arch.num_layers - 1):
        raise UserError(
            f"new layers are MoE layers, copied from the base's last: its {arch.num_layers} layers are all dense; "
            "use a base with MoE layers"
        )
    return pattern


def _build(
    settings: TrainSettings, arch: Architecture, pattern: tuple[str, ...], dsa: DsaSettings, device: Device,
    experts: range | None,
) -> tuple[GPTModel, DsaState]:
    """(model, state): base loaded, new layers initialised, base frozen, on the device."""
    try:
        backend = choose_backend(settings.precision.dsa_backend, device.torch_device.type)
    except ValueError as error:
        raise UserError(f"--dsa-backend: {error}; use auto") from None
    build = BuildSettings(
        dtype=torch.bfloat16 if settings.precision.bf16 else torch.float32,
        aux_loss_coeff=settings.optim.moe_aux_loss_coeff,
        recompute_dsa=settings.precision.recompute_dsa,
        base_indexers=settings.model.train == BASE_INDEXERS,
        expert_parallel=settings.parallel.expert_model_parallel_size,
    )
    model, state = build_model(arch, pattern, dsa, build, backend)
    base = settings.model.base_model
    load_base(model, base, arch, pattern, progress=ranks.is_main(), local_experts=experts)
    if build.base_indexers:
        initialize_base_indexers(model, std=arch.init_std, seed=settings.steps.seed)
        freeze_all_but_indexers(model)
    else:
        how, seed = settings.model.dsa_init, settings.steps.seed
        initialize_dsa_layers(model, pattern, how, std=arch.init_std, seed=seed, local_experts=experts)
        freeze_base(model, pattern)
    model.to(device.torch_device)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    if ranks.is_main():
        note = f" ({backend.describe(backend_sizes(arch, dsa, build.dtype))})" if backend.describe and not build.base_indexers else ""
        print(
            f"device {device.name}, DSA backend {backend.name}{note}, layers {format_pattern(pattern)}, "
            f"{total / 1e6:,.2f}M parameters, {trainable / 1e6:,.2f}M of them train, ranks {ranks.count()}",
            flush=True,
        )
    return model, state


def _identity(
    settings: TrainSettings,
    kind: str,
    arch: Architecture,
    pattern: tuple[str, ...],
    dsa: DsaSettings,
    model: GPTModel,
    experts: range | None,
) -> tuple[Identity, str]:
    """What the run belongs to, and the hash of this rank's frozen part. All ranks must hold parts of one frozen model."""
    base = settings.model.base_model
    # What each rank loaded is compared below, but for experts that no other rank holds: then each machine reads its files.
    reads = ranks.is_main() or (experts is not None and os.environ.get("LOCAL_RANK", "0") == "0")
    with ranks.agreement():
        base_sha256 = directory_identity(base, progress=ranks.is_main()) if reads else None
        hashes = frozen_hashes(model, pattern, experts)
    frozen, parted = merged_hashes(ranks.gather(hashes))
    files = ranks.gather(base_sha256)
    with ranks.agreement():
        other = next((number for number, sha256 in enumerate(files) if sha256 not in (None, files[0])), None)
        if parted or other:
            number, where = (parted[0], parted[2]) if parted else (other, "its files")
            raise UserError(
                f"every rank reads the same base: the weights that rank {number} loaded from {base} differ from those of "
                f"rank {parted[1] if parted else 0} ({where}); copy the base to that rank's machine again"
            )
    identity = Identity(
        kind=BASE_INDEXERS if settings.model.train == BASE_INDEXERS else kind,
        base_path=str(base),
        base_sha256=files[0],
        layer_pattern=pattern,
        dsa=dsa,
        q_rank=arch.hidden_size,
        frozen_sha256=combined_sha256(frozen),
    )
    return identity, combined_sha256(hashes)


def _assemble(
    settings: TrainSettings,
    kind: str,
    arch: Architecture,
    device: Device,
    model: GPTModel,
    state: DsaState,
    identity: Identity,
    experts: range | None,
    frozen_here: str,
) -> Run:
    """Load a checkpoint, open the data, and put optimizer and metrics around the model."""
    distributed_optimizer = settings.parallel.use_distributed_optimizer
    ep = settings.parallel.expert_model_parallel_size
    layout = Layout(parallel_state.get_data_parallel_world_size(), distributed_optimizer, ep)
    chosen = None
    with ranks.agreement():
        if ranks.is_main():  # one reads the files through, for the ranks see one file system
            chosen = choose_start(settings)
    chosen = ranks.broadcast(chosen)
    with ranks.agreement():
        progress = load_start(settings, arch, model, identity, chosen, experts)
        micro_batches = micro_batches_per_step(
            settings.steps.micro_batch_size, settings.steps.global_batch_size, layout.data_parallel
        )
    with removed_on_error(settings.output.save / INDEX_CACHE):
        data = build_data(settings, kind, arch.vocab_size, progress.consumed_samples)
        trunk = open_trunk(settings, model, state, data.rows, identity.base_sha256, identity.layer_pattern, device)
    ddp = wrap_ddp(model, distributed_optimizer, overlap_grad_reduce=settings.parallel.overlap_grad_reduce)
    optimizer = build_optimizer(
        ddp, settings.optim, bf16=settings.precision.bf16, use_distributed_optimizer=distributed_optimizer
    )
    scheduler = build_scheduler(optimizer, settings.optim, settings.steps.train_iters)
    with ranks.agreement():
        if settings.start.load is not None:
            restore_training(*chosen, model, optimizer, scheduler, layout, experts)
        metrics = open_output(settings, identity, progress) if ranks.is_main() else NoMetrics()
    indexers = settings.model.train == BASE_INDEXERS
    flops = FlopsCounter(arch, identity.layer_pattern, identity.dsa, base_indexers=indexers)
    dsa_layers = frozenset(i for i, name in enumerate(identity.layer_pattern) if name == DSA)
    return Run(
        settings=settings,
        device=device,
        model=model,
        state=state,
        optimizer=optimizer,
        scheduler=scheduler,
        step=TrainStep(ddp, optimizer, state, device, settings.optim.indexer_loss_coeff, flops, trunk),
        heldout=HeldoutEvaluation(model, state, data.heldout, dsa_layers, device),
        data=data,
        micro_batches=micro_batches,
        metrics=metrics,
        saver=Saver(settings.output.keep_last),
        identity=identity,
        layout=layout,
        progress=progress,
        experts=experts,
        frozen_here=frozen_here,
    )
