"""The files around the weights of an export: config, tokenizer, code, generation settings."""

import shutil
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.io.publish import atomic_write_json
from megatron_patch.io.strict_json import read_json
from megatron_patch.model.architecture import DsaSettings
from megatron_patch.model.layer_pattern import DSA

ARCHITECTURE = "DeepseekV2DsaForCausalLM"
CODE_DIRECTORY = Path(__file__).parent.parent / "hf_model"
CODE_FILES = ("configuration_deepseek_v2_dsa.py", "modeling_deepseek_v2_dsa.py")
AUTO_MAP = {
    "AutoConfig": "configuration_deepseek_v2_dsa.DeepseekV2DsaConfig",
    "AutoModel": "modeling_deepseek_v2_dsa.DeepseekV2DsaModel",
    "AutoModelForCausalLM": f"modeling_deepseek_v2_dsa.{ARCHITECTURE}",
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def export_config(base: dict, pattern: tuple[str, ...], dsa: DsaSettings, q_rank: int) -> dict:
    """The base's config.json with the DSA layers added; every other key is kept as it stands, in its place.

    It is edited as JSON because transformers would drop `rope_scaling`, `rope_theta` and `torch_dtype` on the way. The
    model type stays `deepseek_v2`: under another one transformers 5 leaves the experts random. No key is called
    `index_topk`, by which inference engines would switch DSA on in every layer.

    Raises:
        UserError: the base's config already has DSA layers, or lists a value per layer.
    """
    require_exportable(base)
    return base | {
        "architectures": [ARCHITECTURE],
        "auto_map": dict(AUTO_MAP),
        "num_hidden_layers": len(pattern),
        "dsa_layers": [i for i, kind in enumerate(pattern) if kind == DSA],
        "dsa_index_topk": dsa.index_topk,
        "dsa_index_n_heads": dsa.index_n_heads,
        "dsa_index_head_dim": dsa.index_head_dim,
        "dsa_q_rank": q_rank,
    }


def require_exportable(base: dict) -> None:
    """
    Raises:
        UserError: the base's config already has DSA layers, or lists a value per layer.
    """
    if "dsa_layers" in base:
        raise UserError(
            "--base must be the base itself: its config.json has dsa_layers; give the model it was made from"
        )
    num_layers = base["num_hidden_layers"]
    per_layer = [k for k, v in base.items() if "layer" in k and isinstance(v, list) and len(v) == num_layers]
    if per_layer:
        raise UserError(
            f"the base's config may list nothing per layer: it has {per_layer}; remove it, V2-Lite has none"
        )


def copy_code(output: Path) -> None:
    """Our configuration and modelling code, which `auto_map` names; the base's own Python files are never copied."""
    for name in CODE_FILES:
        shutil.copyfile(CODE_DIRECTORY / name, output / name)


def require_tokenizer(base: Path) -> None:
    """
    Raises:
        UserError: the base's directory has no tokenizer; an export without one cannot be used.
    """
    if not any((base / name).is_file() for name in _VOCABULARY_FILES):
        raise UserError(f"the base must have its tokenizer: {base} has none of {', '.join(_VOCABULARY_FILES)}; add it")


def copy_texts(base: Path, output: Path, *, native: bool = False) -> list[str]:
    """Tokenizer, chat template, generation settings and licences, byte for byte where that is safe.

    Args:
        native: the export's model type is another than the base's.

    Returns:
        Notes for the user: what had to be changed or made.
    """
    notes = []
    for name in TOKENIZER_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, output / name)
    for file in [*sorted(base.glob("LICENSE*")), *sorted(base.glob("NOTICE*"))]:
        if file.is_file():
            shutil.copyfile(file, output / file.name)
    settings = output / "tokenizer_config.json"
    if settings.is_file():
        try:
            content = read_json(settings)
            has_code = content.pop("auto_map", None) is not None
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"tokenizer_config.json must be a JSON object: {base}: {error}; fetch the file again") from None
        if has_code:  # it names code that is not copied
            notes.append("tokenizer_config.json: auto_map removed, transformers' own tokenizer class is used")
        # transformers knows for deepseek_v2 that this class is declared wrongly (V2-Lite does so: it would split text as
        # SentencePiece does). Releases before deepseek_v32 believe it under that type, and tokens would be others.
        wrong_class = native and _declares_llama(content) and _is_byte_level(output / "tokenizer.json")
        if wrong_class:
            content["tokenizer_class"] = "PreTrainedTokenizerFast"
            notes.append("tokenizer_config.json: tokenizer_class is now PreTrainedTokenizerFast, for its vocabulary is of bytes")
        if has_code or wrong_class:
            atomic_write_json(settings, content)
    if (base / "generation_config.json").is_file():
        shutil.copyfile(base / "generation_config.json", output / "generation_config.json")
    else:
        config = read_json(base / "config.json")
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {name: config[name] for name in names if config.get(name) is not None}
        atomic_write_json(output / "generation_config.json", ids)
        notes.append(f"generation_config.json: the base has none, made from its config: {ids}")
    return notes


def _declares_llama(settings: dict) -> bool:
    return str(settings.get("tokenizer_class")).removesuffix("Fast") == "LlamaTokenizer"


def _is_byte_level(file: Path) -> bool:
    """Whether a tokenizer.json splits text into bytes (GPT-2's way) rather than SentencePiece's pieces."""
    if not file.is_file():
        return False
    try:
        splitter = read_json(file).get("pre_tokenizer") or {}
        parts = splitter.get("pretokenizers", [splitter])
        return any(part.get("type") == "ByteLevel" for part in parts)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"tokenizer.json must be a JSON object: {file}: {error}; fetch the file again") from None
