"""The files around the weights of an export: config, tokenizer, code, generation settings, README."""

import shutil
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.io.publish import atomic_write_json, atomic_write_text
from megatron_patch.io.strict_json import read_json
from megatron_patch.model.architecture import DsaSettings
from megatron_patch.model.layer_pattern import DSA, format_pattern

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


def copy_texts(base: Path, output: Path) -> list[str]:
    """Tokenizer, chat template, generation settings and licences, byte for byte where that is safe.

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
            atomic_write_json(settings, content)
            notes.append("tokenizer_config.json: auto_map removed, transformers' own tokenizer class is used")
    if (base / "generation_config.json").is_file():
        shutil.copyfile(base / "generation_config.json", output / "generation_config.json")
    else:
        config = read_json(base / "config.json")
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {name: config[name] for name in names if config.get(name) is not None}
        atomic_write_json(output / "generation_config.json", ids)
        notes.append(f"generation_config.json: the base has none, made from its config: {ids}")
    return notes


README = """\
# {name}

{base_name} with {num_dsa} DSA (DeepSeek Sparse Attention) layer{plural} on top: layers `{pattern}`.
The base's {num_base} layers are frozen and byte for byte the base's; layer{plural} {layers} were trained
({kind}, iteration {iteration}). Every query of a DSA layer attends to the {topk} keys that its indexer scores highest.

## Load it
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "{name}"  # this directory
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype="auto", attn_implementation="sdpa")
```
Works with transformers 5.9.0 and 5.24.0; `attn_implementation` is `sdpa` or `eager`. The chat template writes the
beginning-of-sequence token itself: tokenise rendered text with `add_special_tokens=False`, or it stands twice.

> **Warning: without `trust_remote_code=True` nothing fails, and the model is wrong.** transformers then takes its
> stock `DeepseekV2ForCausalLM`: the DSA layers get a **random** query projection, and only a load report says
> so. Their attention would moreover be dense: different from this model beyond {topk} tokens whatever the
> weights. Check `model.config.architectures` against `type(model).__name__`: both must be `{architecture}`.

## In verl
```
actor_rollout_ref.model.path={name}
actor_rollout_ref.model.trust_remote_code=True
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
```
`flash_attention_2` is refused by this code. vLLM, vllm-ascend and SGLang do not serve this layout: they switch DSA
on for all layers or for none.

## What the files are
`upcycle_manifest.json` names the base and its hash, the settings of the DSA layers, the training, the hash of the
frozen weights, and the SHA-256 of every file here. `configuration_*.py` and `modeling_*.py` are the code that
`auto_map` names; nothing of the base's own code is here. The base's licence applies to its weights.
"""


def write_readme(
    output: Path, name: str, base_name: str, pattern: tuple[str, ...], topk: int, kind: str, iteration: int
):
    """README.md of the export: what it is, how to load it, and how loading goes wrong in silence."""
    layers = [str(i) for i, layer in enumerate(pattern) if layer == DSA]
    text = README.format(
        name=name,
        base_name=base_name,
        num_dsa=len(layers),
        plural="" if len(layers) == 1 else "s",
        pattern=format_pattern(pattern),
        num_base=len(pattern) - len(layers),
        layers=", ".join(layers),
        kind={"pretrain": "upcycle pretraining", "sft": "supervised fine-tuning"}[kind],
        iteration=iteration,
        topk=topk,
        architecture=ARCHITECTURE,
    )
    atomic_write_text(output / "README.md", text)
