"""What a base model is, read from its Hugging Face `config.json`: no torch, no megatron, so that planning can use it.

Every feature that changes a result is either represented here or refused: a key that is silently ignored is how a
conversion goes wrong (YaRN's `mscale_all_dim` alone moves logits by 3).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.errors import UserError

SUPPORTED_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV2DsaForCausalLM")


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
_REQUIRED = {
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
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}


def read_config(path: str | Path) -> dict:
    """The parsed `config.json` of a directory, or of the file itself.

    Raises:
        UserError: there is no such file, or it is not a JSON object.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"a model is a Hugging Face directory with a config.json: {str(path)!r} has none; "
            "give the directory that holds config.json and the safetensors files"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"config.json must be JSON: {file}: {error}; fetch the file again") from None
    if not isinstance(config, dict):
        raise UserError(
            f"config.json must be a JSON object: {file} holds a {type(config).__name__}; fetch the file again"
        )
    return config


def read_architecture(path: str | Path) -> Architecture:
    """Read and check the base's architecture.

    Args:
        path: a Hugging Face directory, or a `config.json`.

    Raises:
        UserError: not a DeepSeek-V2-Lite-shaped model, or a feature that this code does not implement.
    """
    return architecture_from_config(read_config(path), where=str(path))


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
        integral = field != "norm_eps"
        if isinstance(value, bool) or not isinstance(value, int if integral else (int, float)) or value < 0:
            raise UserError(
                f"{_REQUIRED[field]} must be a non-negative number: {where} has {value!r}; fetch the file again"
            )
    if config.get("num_key_value_heads", values["num_heads"]) != values["num_heads"]:
        raise UserError(
            f"num_key_value_heads must equal num_attention_heads in MLA: {where} has "
            f"{config['num_key_value_heads']} and {values['num_heads']}; fetch the file again"
        )
    return Architecture(
        **values,
        rope=_read_rope(config, where),
        routed_scaling=float(config.get("routed_scaling_factor", 1.0)),
        init_std=float(config.get("initializer_range", 0.02)),
    )


def _read_rope(config: dict, where: str) -> Rope:
    """Both forms: legacy `rope_scaling` + `rope_theta` (published), and `rope_parameters` (transformers 5)."""
    legacy, current = config.get("rope_scaling"), config.get("rope_parameters")
    scaling = current if current is not None else legacy or {}
    if not isinstance(scaling, dict):
        raise UserError(f"rope_scaling must be an object: {where} has {scaling!r}; fetch the file again")
    if legacy and current and any(k in current and current[k] != v for k, v in legacy.items() if k != "type"):
        raise UserError(f"rope_scaling and rope_parameters must agree: {where} has both and they differ; remove one")
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise UserError(f'rope_theta must be given: {where} has none; add V2-Lite\'s "rope_theta": 10000')
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta=float(theta))
    if kind != "yarn":
        raise UserError(f"rope type must be 'default' or 'yarn': {where} has {kind!r}; others are not implemented")
    try:
        return Rope(
            theta=float(theta),
            kind="yarn",
            factor=float(scaling["factor"]),
            original_max_positions=int(scaling["original_max_position_embeddings"]),
            beta_fast=float(scaling.get("beta_fast", 32)),
            beta_slow=float(scaling.get("beta_slow", 1)),
            mscale=float(scaling.get("mscale", 1.0)),
            mscale_all_dim=float(scaling.get("mscale_all_dim", 0.0)),
        )
    except KeyError as error:
        raise UserError(f"YaRN needs {error.args[0]}: {where} lacks it; fetch the file again") from None
