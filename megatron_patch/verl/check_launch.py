"""Whether a model directory fits a launch, from its small files alone, before any device is taken.

    python -m megatron_patch.verl.check_launch --model DIR --trainer fsdp2 --rollout vllm --context 2048

Needs nothing but Python. The scripts of examples/verl/ run it first.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.errors import UserError, run

NATIVE = "DeepseekV32ForCausalLM"
V4 = "DeepseekV4ForCausalLM"
FSDP, MEGATRON = ("fsdp", "fsdp2"), "megatron"
MANIFEST, INDEX = "upcycle_manifest.json", "model.safetensors.index.json"


@dataclass(frozen=True)
class Launch:
    """What a launch wants of the directory.

    Attributes:
        context: most tokens of a prompt and its response.
        bridge: the module that registers a Megatron bridge for the architecture; empty: none.
        ascend: trainer and engine run on NPUs.
    """

    model: Path
    trainer: str
    rollout: str
    context: int
    devices: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    rollout_tensor_parallel: int = 1
    router_replay: str = "disabled"
    bridge: str = ""
    ascend: bool = False


def check_launch(launch: Launch) -> list[str]:
    """Notes that do not stop the launch.

    Raises:
        UserError: the directory is incomplete, or trainer or engine would fail or silently compute something else.
    """
    config = _json(launch.model / "config.json")
    architecture = _architecture(launch, config)
    _files(launch.model)
    _sizes(launch, config)
    _router_replay(launch)
    notes: list[str] = []
    if "auto_map" in config and architecture == NATIVE:
        notes += _context(launch, config)
    if launch.trainer in FSDP and not (architecture == NATIVE and "auto_map" in config):
        raise UserError(
            f"TRAINER={launch.trainer} needs a model that verl's transformers can build: {architecture} in {launch.model} is not "
            "one; use TRAINER=megatron, or export the upcycled model with --layout native"
        )
    if launch.trainer == MEGATRON and architecture in (NATIVE, V4) and not launch.bridge:
        raise UserError(
            f"TRAINER=megatron needs a bridge for {architecture}: none is named; set BRIDGE_LIB to the module that registers one "
            "(docs/verl.md says where)"
        )
    quantised = config.get("quantization_config")
    if quantised:
        notes.append(
            f"the weights are {quantised.get('quant_method', 'quantised')}: the trainer holds bf16, so the bridge must dequantise "
            "them on loading, and what the engine gets at each sync is bf16"
        )
    experts = _experts(config)
    if launch.ascend and architecture in (NATIVE, V4) and "auto_map" not in config and experts != 256:
        notes.append(
            f"{experts} experts: a MoE gating kernel of Ascend was reported to know 256 alone (vllm-ascend #5310); try one forward pass first"
        )
    return notes


def _architecture(launch: Launch, config: dict) -> str:
    names = config.get("architectures") or []
    if len(names) != 1:
        raise UserError(f"config.json must name one architecture: {names} in {launch.model}; verl takes no other")
    if names[0] == "DeepseekV2DsaForCausalLM":
        raise UserError(
            f"MODEL must be in a layout that rollout engines serve: {launch.model} is a hybrid export; export it with --layout native"
        )
    return names[0]


def _files(model: Path) -> None:
    for name in ("tokenizer.json", "generation_config.json"):
        if not (model / name).is_file():
            raise UserError(
                f"verl needs {name}: {model} has none; copy it from the model that the directory was made of"
            )
    tokenizer = _json(model / "tokenizer_config.json")
    if not (model / "chat_template.jinja").is_file() and not tokenizer.get("chat_template"):
        raise UserError(
            f"verl renders prompts with the model's chat template: {model} has none; put one into {model}/chat_template.jinja"
        )
    if not (model / INDEX).is_file() and (model / "model.safetensors").is_file():
        return
    shards = set(_json(model / INDEX).get("weight_map", {}).values())
    missing = sorted(shard for shard in shards if not (model / shard).is_file())
    if missing or not shards:
        raise UserError(
            f"{INDEX} must name the weights: {missing[0] if missing else 'no file'} of {model} is missing; copy the directory again"
        )


def _sizes(launch: Launch, config: dict) -> None:
    heads, experts = config.get("num_attention_heads", 0), _experts(config)
    for name, size in (("TP", launch.tensor_parallel), ("ROLLOUT_TP", launch.rollout_tensor_parallel)):
        if size < 1 or heads % size:
            raise UserError(f"{name} must divide the {heads} attention heads: {size}; choose a divisor")
    if launch.expert_parallel < 1 or experts % launch.expert_parallel:
        raise UserError(
            f"EP must divide the {experts} routed experts of the model: {launch.expert_parallel}; choose a divisor"
        )
    group = launch.tensor_parallel * launch.pipeline_parallel
    for name, size in (
        ("TP * PP", group),
        ("EP * PP", launch.expert_parallel * launch.pipeline_parallel),
        ("ROLLOUT_TP", launch.rollout_tensor_parallel),
    ):
        if launch.devices % size:
            raise UserError(
                f"{name} must divide the {launch.devices} devices: {size}; change it, NNODES or DEVICES_PER_NODE"
            )


def _router_replay(launch: Launch) -> None:
    if launch.router_replay != "disabled" and launch.trainer != MEGATRON:
        raise UserError(
            f"ROUTER_REPLAY={launch.router_replay} needs TRAINER=megatron: the FSDP engine of verl 0.9.1 replays no routes; set "
            "ROUTER_REPLAY=disabled"
        )


def _context(launch: Launch, config: dict) -> list[str]:
    """Neutral indexers select by no score at all: beyond top-k, the base's layers would read arbitrary keys."""
    topk = config["index_topk"]
    manifest = _json(launch.model / MANIFEST) if (launch.model / MANIFEST).is_file() else {}
    kind = manifest.get("native", {}).get("base_indexers", {}).get("kind")
    if launch.context <= topk:
        return [f"contexts of {launch.context} tokens fit index_topk = {topk}: no indexer chooses anything in this run"]
    if kind in (None, "neutral"):
        raise UserError(
            f"PROMPT_LENGTH + RESPONSE_LENGTH must be at most index_topk = {topk}, because the base's indexers are {kind or 'of unknown kind'}: "
            f"{launch.context}; shorten them, or export with trained base indexers"
        )
    return []


def _experts(config: dict) -> int:
    return config.get("n_routed_experts") or 1


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.name} must be in MODEL: {path} is not there; give the directory of a model") from None
    except ValueError as error:
        raise UserError(f"{path} must be JSON: {error}; copy the directory again") from None


def main() -> None:
    parser = argparse.ArgumentParser(prog="check_launch", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--trainer", choices=(*FSDP, MEGATRON), required=True)
    parser.add_argument("--rollout", choices=("vllm", "vllm-ascend", "sglang"), required=True)
    parser.add_argument("--context", type=int, required=True)
    for name in ("devices", "tensor-parallel", "pipeline-parallel", "expert-parallel", "rollout-tensor-parallel"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--router-replay", choices=("disabled", "R2", "R3"), default="disabled")
    parser.add_argument("--bridge", default="")
    parser.add_argument("--ascend", action="store_true")
    for note in check_launch(Launch(**vars(parser.parse_args()))):
        print(f"note: {note}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run(main))
