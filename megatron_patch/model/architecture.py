"""What a base model is, read from its Hugging Face `config.json`: no torch, no megatron, so that planning can use it.

Every feature that changes a result is either represented here or refused: a key that is silently ignored is how a
conversion goes wrong (YaRN's `mscale_all_dim` alone moves logits by 3).
"""

import math
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.io.strict_json import read_json

SUPPORTED_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV2DsaForCausalLM")
NATIVE_ARCHITECTURE = "DeepseekV32ForCausalLM"  # of an export whose layers are all DSA
BASE_LAYERS = "dsa_base_layers"  # the key by which such an export says how many of them are the base's


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding; `kind` is "default" or "yarn" (arXiv 2309.00071)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def softmax_mscale(self) -> float:
        """Factor on the softmax scale, already squared: (0.1 * mscale_all_dim * ln(factor) + 1)^2, 1 without YaRN."""
        if self.kind != "yarn" or not self.mscale_all_dim or self.factor <= 1:
            return 1.0
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0) ** 2


@dataclass(frozen=True)
class DsaSettings:
    """Sizes of the lightning indexer (DeepSeek-V3.2 report, section 2.1)."""

    index_topk: int = 2048
    index_n_heads: int = 64
    index_head_dim: int = 128

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be positive: {value}; the default fits V2-Lite")


@dataclass(frozen=True)
class Architecture:
    """A DeepSeek-V2-Lite-shaped base: MLA with a plain query projection, one or more dense layers, then MoE layers."""

    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    ffn_size: int
    moe_ffn_size: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    first_dense_layers: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float
    max_positions: int
    rope: Rope
    routed_scaling: float = 1.0
    init_std: float = 0.02

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(qk_head_dim) times YaRN's factor; leaving the latter out is transformers issue 47435."""
        return self.qk_head_dim**-0.5 * self.rope.softmax_mscale

    @property
    def dsa_q_rank(self) -> int:
        """Rank of the query latent of a DSA layer: as wide as the model, so that it can be copied from a plain projection."""
        return self.hidden_size

    @property
    def trains_whole(self) -> bool:
        """Whether all layers train. A base is frozen."""
        return False

    def is_moe(self, layer: int) -> bool:
        """Whether layer `layer` (0-based) has routed experts."""
        return layer >= self.first_dense_layers


# What V2-Lite fixes and this code relies on: (key, the only value supported, value when the key is absent).
# `q_lora_rank`: the absent value is transformers' default for deepseek_v2 (1536), which is not V2-Lite's.
_FIXED = (
    ("hidden_act", "silu", "silu"),
    ("q_lora_rank", None, 1536),
    ("scoring_func", "softmax", "softmax"),
    ("topk_method", "greedy", "greedy"),
    ("norm_topk_prob", False, False),
    ("moe_layer_freq", 1, 1),
    ("tie_word_embeddings", False, False),
    ("rms_norm_eps", 1e-6, 1e-6),  # transformers hard-codes it in the latent norms, whatever the config says
    ("attention_bias", False, False),
    ("mlp_bias", False, False),
    ("attention_dropout", 0.0, 0.0),
    ("quantization_config", None, None),
)
SIZE_KEYS = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "ffn_size": "intermediate_size",
    "moe_ffn_size": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "first_dense_layers": "first_k_dense_replace",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_REQUIRED = {**SIZE_KEYS, "norm_eps": "rms_norm_eps", "max_positions": "max_position_embeddings"}


def read_config(path: str | Path) -> dict:
    """The parsed `config.json` of a directory, or of the file itself.

    Raises:
        UserError: there is no such file, or it is not a JSON object.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = read_json(file)
    except FileNotFoundError:
        raise UserError(
            f"a model is a Hugging Face directory with a config.json: {str(path)!r} has none; "
            "give the directory that holds config.json and the safetensors files"
        ) from None
    except ValueError as error:
        raise UserError(f"config.json must be JSON: {file}: {error}; fetch the file again") from None
    if not isinstance(config, dict):
        raise UserError(
            f"config.json must be a JSON object: {file} holds a {type(config).__name__}; fetch the file again"
        )
    return config


def read_architecture(path: str | Path, *, export: bool = False) -> Architecture:
    """Read and check the base's architecture.

    Args:
        path: a Hugging Face directory, or a `config.json`.
        export: also accept a model with DSA layers, which then count as layers.

    Raises:
        UserError: not a DeepSeek-V2-Lite-shaped model, or a feature that this code does not implement.
    """
    config = read_config(path)
    native = is_native(config)
    if (config.get("dsa_layers") or native) and not export:
        has = "DSA in every layer" if native else f"dsa_layers {config['dsa_layers']}"
        raise UserError(
            f"the base must be the model without DSA layers: {str(path)!r} has {has}; give "
            "the base that it was made from (to train an export on, add it as --pretrained-checkpoint)"
        )
    return architecture_from_config(_without_latent(config, str(path)) if native else config, where=str(path))


def is_native(config: dict) -> bool:
    """Whether a parsed config.json is that of an export in the native layout."""
    return config.get("architectures") == [NATIVE_ARCHITECTURE] and BASE_LAYERS in config


def _without_latent(config: dict, where: str) -> dict:
    """A native export's config with its base's form of the query, which is what `Architecture` describes."""
    if config.get("q_lora_rank") != config.get("hidden_size"):
        raise UserError(
            f"an export's query latent is as wide as the model: {where} has q_lora_rank {config.get('q_lora_rank')!r}, "
            f"hidden_size {config.get('hidden_size')!r}; export it again"
        )
    return config | {"q_lora_rank": None, "architectures": [SUPPORTED_ARCHITECTURES[1]]}


def architecture_from_config(config: dict, where: str = "config.json") -> Architecture:
    """As `read_architecture`, from the parsed JSON; `where` names it in messages."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in SUPPORTED_ARCHITECTURES:
        raise UserError(
            f"the base must be one of {', '.join(SUPPORTED_ARCHITECTURES)}: {where} says {names}; "
            "give a DeepSeek-V2-Lite(-Chat) directory"
        )
    for key, supported, absent in _FIXED:
        value = config.get(key, absent)
        if value != supported:
            raise UserError(f"{key} must be {supported!r}: {where} has {value!r}; only V2-Lite's value is implemented")
    missing = [key for key in _REQUIRED.values() if config.get(key) is None]
    if missing:
        raise UserError(f"config.json must name the sizes of the model: {where} lacks {missing}; fetch the file again")
    values = {field: config[key] for field, key in _REQUIRED.items()}
    for field, value in values.items():
        if field == "norm_eps":
            continue  # one of _FIXED
        least = 0 if field == "first_dense_layers" else 1
        if type(value) is not int or value < least:
            raise UserError(
                f"{_REQUIRED[field]} must be a whole number of {least} or more: {where} has {value!r}; fetch the file again"
            )
    if values["experts_per_token"] > values["num_experts"]:
        raise UserError(
            f"num_experts_per_tok must not exceed n_routed_experts: {where} has {values['experts_per_token']} and "
            f"{values['num_experts']}; fetch the file again"
        )
    if values["qk_rope_head_dim"] % 2:
        raise UserError(
            f"qk_rope_head_dim must be even, RoPE turns pairs: {where} has {values['qk_rope_head_dim']}; fetch the file again"
        )
    if config.get("num_key_value_heads", values["num_heads"]) != values["num_heads"]:
        raise UserError(
            f"num_key_value_heads must equal num_attention_heads in MLA: {where} has "
            f"{config['num_key_value_heads']} and {values['num_heads']}; fetch the file again"
        )
    return Architecture(
        **values,
        rope=read_rope(config, where),
        routed_scaling=_number(config, "routed_scaling_factor", where, 1.0),
        init_std=_number(config, "initializer_range", where, 0.02),
    )


_ROPE_KEYS = {"type", "rope_type", "rope_theta"}
_YARN_KEYS = _ROPE_KEYS | {
    "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"
}  # fmt: skip


def read_rope(config: dict, where: str) -> Rope:
    """Both forms: legacy `rope_scaling` + `rope_theta` (published), and `rope_parameters` (transformers 5)."""
    forms = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    for key, value in forms.items():
        if not isinstance(value, dict):
            raise UserError(f"{key} must be an object: {where} has {value!r}; fetch the file again")
    ropes = {_rope_of_form(form, config, where) for form in forms.values() or [{}]}
    if len(ropes) > 1:
        raise UserError(f"rope_scaling and rope_parameters must agree: {where} has both and they differ; remove one")
    return ropes.pop()


def _rope_of_form(form: dict, config: dict, where: str) -> Rope:
    thetas = [holder for holder in (form, config) if holder.get("rope_theta") is not None]
    if not thetas:
        raise UserError(f'rope_theta must be given: {where} has none; add V2-Lite\'s "rope_theta": 10000')
    theta = _number(thetas[0], "rope_theta", where, positive=True)
    if thetas[-1]["rope_theta"] != theta:
        raise UserError(f"rope_theta must be one: {where} has {theta:g} and {thetas[-1]['rope_theta']!r}; remove one")
    kinds = {form[key] for key in ("type", "rope_type") if isinstance(form.get(key), str)} or {"default"}
    if len(kinds) > 1 or not kinds <= {"default", "yarn"}:
        shown = " and ".join(map(repr, sorted(kinds)))
        raise UserError(f"rope type must be 'default' or 'yarn': {where} has {shown}; others are not implemented")
    yarn = "yarn" in kinds
    unknown = sorted(k for k in form.keys() - (_YARN_KEYS if yarn else _ROPE_KEYS) if form[k] is not None)
    if unknown:
        raise UserError(f"every key of RoPE must be known: {where} has {unknown} beside {kinds.pop()!r}; not implemented")
    if not yarn:
        return Rope(theta=theta)
    for key in ("factor", "original_max_position_embeddings"):
        if form.get(key) is None:
            raise UserError(f"YaRN needs {key}: {where} lacks it; fetch the file again")
    return Rope(
        theta=theta,
        kind="yarn",
        factor=_number(form, "factor", where, positive=True),
        original_max_positions=int(_number(form, "original_max_position_embeddings", where, positive=True)),
        beta_fast=_number(form, "beta_fast", where, 32.0),
        beta_slow=_number(form, "beta_slow", where, 1.0),
        mscale=_number(form, "mscale", where, 1.0),
        mscale_all_dim=_number(form, "mscale_all_dim", where, 0.0),
    )


def _number(holder: dict, key: str, where: str, default: float | None = None, *, positive: bool = False) -> float:
    value = holder.get(key, default)
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0 or (positive and not value):
        least = "above 0" if positive else "of 0 or more"
        raise UserError(f"{key} must be a number {least}: {where} has {value!r}; fetch the file again")
    return float(value)
