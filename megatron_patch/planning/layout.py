"""Bytes per device of a parallel layout: weights, gradients, optimizer exactly; activations and logits by formula."""

from dataclasses import dataclass, fields
from functools import cache
from math import ceil

from megatron_patch.config import ParallelSettings
from megatron_patch.errors import UserError
from megatron_patch.model.architecture import Architecture, DsaSettings
from megatron_patch.model.layer_pattern import DSA
from megatron_patch.planning.parameters import Part

GRADIENT_BYTES = 4  # DDP's buffer is fp32, and holds all trainable parameters also with a distributed optimizer
ADAM_BYTES = 8  # two moments, fp32
MAIN_COPY_BYTES = 4  # fp32 weights beside bf16 ones
# Of ops/chunked.py, written out again since planning works without torch; a test holds the two together.
CHUNK_BYTES = 64 * 2**20
CHUNK_PAIR_BYTES = 40
# Of model/head_loss.py, likewise.
HEAD_CHUNK_BYTES, HEAD_LEAST_CHUNK = 64 << 20, 16


@dataclass
class PlanParallel(ParallelSettings):
    """The layout flags of the training scripts. A plan may ask for any layout, also one that does not train yet."""

    def __post_init__(self) -> None:
        for each in fields(ParallelSettings):
            value = getattr(self, each.name)
            if type(value) is int and value < 1:
                raise UserError(f"--{each.name.replace('_', '-')} must be positive: {value}; 1 switches it off")


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups: tensor, pipeline, expert, expert-tensor, context, data.

    `expert_dp` is the number of devices that hold the same experts.
    """

    tp: int
    pp: int
    ep: int
    etp: int
    cp: int
    dp: int
    expert_dp: int
    distributed_optimizer: bool


@dataclass(frozen=True)
class Bytes:
    """Bytes on the fullest device, by part."""

    frozen: int
    trainable: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.frozen + self.trainable + self.optimizer + self.activations + self.logits


@dataclass(frozen=True)
class Work:
    """What one rank does at a time: tokens of a micro-batch, and bytes of a weight or activation (2 bf16, 4 fp32).

    `recompute`: layers that train keep their inputs only.
    """

    seq_length: int
    micro_batch_size: int
    width: int
    recompute: bool = False

    @property
    def tokens(self) -> int:
        return self.seq_length * self.micro_batch_size


def make_layout(parallel: ParallelSettings, devices: int, arch: Architecture, num_layers: int) -> Layout:
    """The groups that `devices` form.

    Raises:
        UserError: the sizes do not divide the devices, the heads or the experts, or are known to train wrongly.
    """
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    cp = parallel.context_parallel_size

    def require(holds: bool, rule: str, value: str, remedy: str) -> None:
        if not holds:
            raise UserError(f"{rule}: {value}; {remedy}")

    shared = tp * pp * cp
    require(devices >= 1, "--devices must be positive", str(devices), "give the devices in all")
    require(
        devices % shared == 0, "--devices must be a multiple of tensor x pipeline x context", f"{devices} % {shared} != 0",
        f"use {ceil(devices / shared) * shared} devices",
    )  # fmt: skip
    require(
        devices // pp % (ep * etp) == 0, "devices of a pipeline stage must be a multiple of expert x expert-tensor",
        f"{devices // pp} % {ep * etp} != 0", "lower --expert-model-parallel-size or take more devices",
    )  # fmt: skip
    require(
        arch.num_experts % ep == 0, "--expert-model-parallel-size must divide the experts",
        f"{arch.num_experts} % {ep} != 0", "use a power of two",
    )  # fmt: skip
    require(
        arch.num_heads % tp == 0, "--tensor-model-parallel-size must divide the heads", f"{arch.num_heads} % {tp} != 0",
        "use a power of two",
    )  # fmt: skip
    require(pp <= num_layers, "pipeline stages need a layer each", f"{pp} > {num_layers}", "use fewer stages")
    require(
        tp == 1 or parallel.sequence_parallel, "tensor parallelism of MoE layers trains only with --sequence-parallel",
        f"{tp} without it", "add --sequence-parallel",
    )  # fmt: skip
    # Expert gradients would not be summed over the tensor-parallel ranks: silently wrong.
    require(
        tp == 1 or ep > 1 or etp == tp, "with expert parallel 1, --expert-tensor-parallel-size must equal tensor parallel",
        f"{etp} != {tp}", f"use --expert-tensor-parallel-size {tp}",
    )  # fmt: skip
    return Layout(
        tp, pp, ep, etp, cp, devices // shared, devices // pp // (ep * etp), parallel.use_distributed_optimizer
    )


@cache  # asked for every part of every stage of every layout
def stage_of(layer: int, num_layers: int, stages: int) -> int:
    """The pipeline stage of a layer: as even as can be, earlier stages take what is left over."""
    if layer < 0:
        return 0
    return next((stage for stage in range(stages) if layer < layers_of(stage, num_layers, stages).stop), stages - 1)


@cache
def layers_of(stage: int, num_layers: int, stages: int) -> range:
    """The layers of a pipeline stage."""
    short, longer = divmod(num_layers, stages)
    begin = stage * short + min(stage, longer)
    return range(begin, begin + short + (stage < longer))


def by_stage(found: list[Part], num_layers: int, stages: int) -> list[list[Part]]:
    """The parts of each stage, sorted out once: a search asks for every stage of hundreds of layouts."""
    held: list[list[Part]] = [[] for _ in range(stages)]
    for part in found:
        held[stage_of(part.layer, num_layers, stages)].append(part)
    return held


def bytes_per_device(
    found: list[Part], arch: Architecture, pattern: tuple[str, ...], dsa: DsaSettings, layout: Layout, work: Work
) -> Bytes:
    """The fullest pipeline stage's device. `found` is from `parameters.parts`."""
    held = by_stage(found, len(pattern), layout.pp)
    stages = [_stage(own, arch, pattern, dsa, layout, work, stage) for stage, own in enumerate(held)]
    return max(stages, key=lambda each: each.total)


def _stage(own: list[Part], arch, pattern, dsa, layout: Layout, work: Work, stage: int) -> Bytes:
    split = {"tensor": layout.tp, "experts": layout.ep * layout.etp, "whole": 1}
    copies = {"tensor": layout.dp * layout.cp, "experts": layout.expert_dp, "whole": layout.dp * layout.cp}
    per_parameter = ADAM_BYTES + (MAIN_COPY_BYTES if work.width < 4 else 0)
    frozen = trainable = optimizer = 0
    for part in own:
        count = ceil(part.parameters / split[part.split])
        if not part.trainable:
            frozen += count * work.width
            continue
        trainable += count * (work.width + GRADIENT_BYTES)
        spread = copies[part.split] if layout.distributed_optimizer else 1
        optimizer += ceil(count * per_parameter / spread)
    dsa_layers = sum(pattern[layer] == DSA for layer in layers_of(stage, len(pattern), layout.pp))
    is_last = stage == layout.pp - 1
    return Bytes(
        frozen,
        trainable,
        optimizer,
        # A stage holds the activations of the micro-batches that are on their way to the last stage and back.
        activation_bytes(arch, dsa, dsa_layers, layout, work, in_flight=layout.pp - stage),
        logit_bytes(arch, layout, work) if is_last else 0,
    )


def logit_bytes(arch: Architecture, layout: Layout, work: Work) -> int:
    """What the loss takes. Under a frozen head, whose logits are made in chunks of tokens: one chunk (fp32; in bf16 also the logits
    and their gradient in bf16) and the gradient of the hidden states. Else logits, fp32 copy and gradient of all tokens."""
    tokens, words = work.tokens // layout.cp, ceil(arch.vocab_size / layout.tp)
    if arch.trains_whole:
        return tokens * words * (work.width + 4 + 4)
    chunk = min(tokens, max(HEAD_LEAST_CHUNK, HEAD_CHUNK_BYTES // (4 * words)))
    return chunk * words * (4 if work.width == 4 else 4 + 2 * work.width) + tokens * arch.hidden_size * work.width


def activation_bytes(arch: Architecture, dsa: DsaSettings, dsa_layers: int, layout: Layout, work: Work, in_flight: int = 1) -> int:
    """What the DSA layers take besides weights: what autograd keeps for each, and the op's workspace in one of them.

    Frozen layers take nothing: autograd starts at the first trainable one. With recomputation one layer is whole at a time.
    """
    if dsa_layers == 0:
        return 0
    whole, workspace = kept_bytes(arch, dsa, layout, work), workspace_bytes(arch, dsa, layout, work)
    if work.recompute:
        inputs = work.tokens // (layout.cp * layout.tp) * arch.hidden_size * work.width
        return in_flight * dsa_layers * inputs + whole + workspace
    return in_flight * dsa_layers * whole + workspace


def kept_bytes(arch: Architecture, dsa: DsaSettings, layout: Layout, work: Work) -> int:
    """What autograd keeps for the backward pass of one DSA layer with the chunked op. An estimate.

    Per token, with w bytes an activation (D hidden, H heads, Q/V their sizes, R = D query latent, C key-value latent,
    J x E index heads, k experts of F a token, S the shared experts' size):

        norms     (4 + w)(2 D + R + C)         input in fp32, normalised value
        linears   w (2 D + R + C + H V)        inputs of the projections
        op        w H (2 Q + V)                query, key, value
                  4 (J E + E + J)              the indexer's gradients, which the forward pass finishes
                  4 index_topk                 selected positions
        experts   w k (D + 6 F) + 5 w S        permuted input, gate-up, activation, product, weighted product
    """
    w, hidden, heads = work.width, arch.hidden_size, arch.num_heads // layout.tp
    shared = arch.moe_ffn_size * arch.num_shared_experts // layout.tp
    latents = 2 * hidden + arch.dsa_q_rank + arch.kv_lora_rank
    per_token = (4 + w) * latents + w * (latents + heads * arch.v_head_dim)
    per_token += w * _attention_numbers(arch, layout)
    per_token += 4 * (dsa.index_n_heads * (dsa.index_head_dim + 1) + dsa.index_head_dim)
    per_token += 4 * min(dsa.index_topk, work.seq_length)
    per_token += w * arch.experts_per_token * (hidden + 6 * arch.moe_ffn_size) + 5 * w * shared
    return per_token * work.tokens // layout.cp


def workspace_bytes(arch: Architecture, dsa: DsaSettings, layout: Layout, work: Work) -> int:
    """The chunked op's own: a chunk of queries, and the gradients of query, key and value in fp32.

    The worst case is assumed, one document as long as the sample. A chunk is one query at least.
    """
    per_query = work.seq_length * (4 * (dsa.index_n_heads + 2 * arch.num_heads // layout.tp) + CHUNK_PAIR_BYTES)
    chunk = max(per_query, min(CHUNK_BYTES, work.seq_length * per_query))
    return chunk + 4 * _attention_numbers(arch, layout) * work.tokens // layout.cp


def _attention_numbers(arch: Architecture, layout: Layout) -> int:
    """In query, key and value of one token: H (2 Q + V)."""
    return arch.num_heads // layout.tp * (2 * arch.qk_head_dim + arch.v_head_dim)
