"""Is an export what it claims to be? Compared with its base from the files, then loaded with transformers.

No code of the export runs: its Python files must equal this package's, and those are what loads it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from megatron_patch.checkpoint import check_native, export_files
from megatron_patch.checkpoint.check_native import same_bits
from megatron_patch.checkpoint.export import MANIFEST_FILE
from megatron_patch.checkpoint.hf_mapping import require_same_names
from megatron_patch.checkpoint.layouts import (
    ARCHITECTURES,
    HYBRID,
    NATIVE,
    ExportTensors,
    export_tensors,
    layout_config,
    layout_of,
)
from megatron_patch.checkpoint.load_base import IGNORED_HF_NAMES
from megatron_patch.claims import Failed, Skipped, all_hold, examine, print_table, say_failures
from megatron_patch.errors import EXIT_OK, EXIT_USER
from megatron_patch.io.finite import all_finite
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.publish import atomic_write_json
from megatron_patch.io.safetensors_dir import SafetensorsDir
from megatron_patch.io.strict_json import read_json
from megatron_patch.model.architecture import Architecture, DsaSettings, read_architecture, read_config
from megatron_patch.model.layer_pattern import appended_pattern

SCHEMA = 1
_WITHOUT_TRUST = {
    HYBRID: "transformers raises no error: its stock class takes the directory with a random query projection in the DSA "
    "layers and dense attention, and gives wrong results.",
    NATIVE: "transformers from 5.11 on raises no error: its own deepseek_v32 routes by sigmoid, and gives wrong results.",
}
_CONVERSATION = [
    {"role": "user", "content": "Which key opens the door?"},
    {"role": "assistant", "content": "The third."},
    {"role": "user", "content": "And the window?"},
]


def check(export: str | Path, base: str | Path, json_file: str | Path | None = None, *, load: bool = True) -> int:
    """Check an export against its base, print a table, and optionally write it as JSON.

    Args:
        export: directory that `dsa-upcycle export` wrote.
        base: the base's directory.
        json_file: where to write `{"schema": 1, "verdict": "pass"|"fail", "checks": [{"name", "status", "detail"}]}`.
        load: also load the model, which takes its size in memory.

    Returns:
        0 if every check passed or did not apply, 2 if one failed.

    Raises:
        UserError: `base` is no base, or one of the two is no model directory.
    """
    export, base = Path(export), Path(base)
    base_tensors = SafetensorsDir(base)
    read_architecture(base)
    native = layout_of(read_config(export)) == NATIVE
    claims: list[tuple[str, Callable[[], str]]] = [
        ("config", lambda: _config(export, base)),
        ("tensor names", lambda: _names(export, base)),
        ("base tensors", lambda: _base_bytes(export, base_tensors)),
        ("DSA tensors", lambda: _dsa_tensors(export, base)),
        *([("native layers", lambda: check_native.native_layers(export, base))] if native else []),
        ("files", lambda: _files(export)),
        ("code", lambda: _code(export)),
        ("tokenizer", lambda: _tokenizer(export, base)),
        ("chat template", lambda: _chat_template(export, base)),
    ]
    checks = [examine(name, claim) for name, claim in claims]
    sound = all_hold(checks)
    checks.append(examine("loads", lambda: _loads(export, load, sound)))
    passed = all_hold(checks)
    print_table(f"check of {export}", checks)
    print(f"Load it with trust_remote_code=True. Without, {_WITHOUT_TRUST[NATIVE if native else HYBRID]}")
    if json_file is not None:
        atomic_write_json(
            json_file,
            {
                "schema": SCHEMA,
                "export": str(export),
                "base": str(base),
                "verdict": "pass" if passed else "fail",
                "checks": [asdict(item) for item in checks],
            },
        )
    if passed:
        return EXIT_OK
    say_failures(f"an export ({export})", checks, "export it again")
    return EXIT_USER


@dataclass(frozen=True)
class _Claimed:
    """What the export's config.json says of its DSA layers, and what follows from that and from the base."""

    layout: str
    arch: Architecture
    pattern: tuple[str, ...]
    dsa: DsaSettings
    q_rank: int

    def tensors(self) -> ExportTensors:
        return export_tensors(self.layout, self.arch, self.pattern, self.dsa)


def _claimed(export: Path, base: Path) -> _Claimed:
    config, arch = read_config(export), read_architecture(base)
    layout = layout_of(config)
    if layout == NATIVE:
        keys = ("index_topk", "index_n_heads", "index_head_dim", "q_lora_rank", "num_hidden_layers")
    else:
        keys = ("dsa_index_topk", "dsa_index_n_heads", "dsa_index_head_dim", "dsa_q_rank")
    values = [config.get(key) for key in keys]
    layers = config.get("dsa_layers", [])
    if not all(type(v) is int and v > 0 for v in values) or not isinstance(layers, list) or (layout != NATIVE and not layers):
        raise Failed(f"config.json lacks whole numbers in {', '.join(keys)}{'' if layout == NATIVE else ' or a list in dsa_layers'}")
    num_dsa = values[4] - arch.num_layers if layout == NATIVE else len(layers)
    if num_dsa < 1:
        raise Failed(f"num_hidden_layers is {values[4]}, must exceed the base's {arch.num_layers}")
    return _Claimed(layout, arch, appended_pattern(arch.num_layers, num_dsa), DsaSettings(*values[:3]), values[3])


def _config(export: Path, base: Path) -> str:
    """Equal to what the exporter would write now; so every other key is the base's."""
    config, base_config = read_config(export), read_config(base)
    claimed = _claimed(export, base)
    expected = layout_config(
        claimed.layout, base_config, claimed.arch, claimed.pattern, claimed.dsa, claimed.q_rank
    )
    differing = sorted(k for k in config.keys() | expected.keys() if config.get(k, Failed) != expected.get(k, Failed))
    if differing:
        shown = "; ".join(
            f"{k}: {config.get(k, '(absent)')!r}, not {expected.get(k, '(absent)')!r}" for k in differing[:4]
        )
        raise Failed(f"{len(differing)} keys are not the base's with the DSA layers added: {shown}")
    changed = sorted(k for k in expected if base_config.get(k, Failed) != expected[k])
    return f"one architecture, {ARCHITECTURES[claimed.layout]}; differs from the base's only in {', '.join(changed)}"


def _names(export: Path, base: Path) -> str:
    found = [name for name in SafetensorsDir(export) if not IGNORED_HF_NAMES.fullmatch(name)]
    require_same_names(str(export), _claimed(export, base).tensors().shapes, found, "export again")
    return f"{len(found)}, none missing, none extra"


def _base_bytes(export: Path, base: SafetensorsDir) -> str:
    """Every tensor of the base, bit for bit (as bytes: NaN and negative zero count), under its name in the export."""
    tensors, kept = SafetensorsDir(export), _claimed(export, base.path).tensors().kept
    total = sum(base.nbytes(name) for name in base)
    with tqdm(total=total, unit="B", unit_scale=True, desc="compare with base", leave=False) as bar:
        differing = []
        for name in base:
            target = kept.get(name, name)
            if target not in tensors or not same_bits(base.load(name), tensors.load(target)):
                differing.append(name)
            bar.update(base.nbytes(name))
    if differing:
        raise Failed(f"{len(differing)} of {len(base)} differ from the base's, the first is {differing[0]}")
    return f"{len(base)} tensors, {total / 1e9:.3f} GB, bit-identical to the base's"


def _dsa_tensors(export: Path, base: Path) -> str:
    claimed = _claimed(export, base)
    if claimed.q_rank != claimed.arch.hidden_size:
        raise Failed(f"the query latent is {claimed.q_rank} wide, must be the hidden size {claimed.arch.hidden_size}")
    expected = claimed.tensors()
    of_base, tensors, count = set(expected.kept.values()), SafetensorsDir(export), 0
    for name, shape in expected.shapes.items():
        if name in of_base:
            continue
        if name not in tensors:
            raise Failed(f"{name} is missing")
        if tensors.shape(name) != shape:
            raise Failed(f"{name} has shape {tensors.shape(name)}, must be {shape}")
        tensor = tensors.load(name)
        if not all_finite(tensor):
            raise Failed(f"{name} holds {int((~tensor.isfinite()).sum())} values that are not finite")
        count += tensor.numel()
    layers = len(claimed.pattern) if claimed.layout == NATIVE else len(claimed.pattern) - claimed.arch.num_layers
    return f"{layers} layers, {count:,} parameters, right shapes, finite"


def _files(export: Path) -> str:
    """Every file is the one that was written: its hash stands in the manifest."""
    try:
        manifest = read_json(export / MANIFEST_FILE)
        recorded = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Failed(f"{MANIFEST_FILE} cannot be read: {error}") from None
    there = {str(item.relative_to(export)) for item in export.rglob("*") if item.is_file()} - {MANIFEST_FILE}
    for fault, names in (("missing", recorded.keys() - there), ("not written by the export", there - recorded.keys())):
        if names:
            raise Failed(f"{len(names)} files are {fault}: {', '.join(sorted(names)[:3])}")
    total = sum((export / name).stat().st_size for name in recorded)
    with tqdm(total=total, unit="B", unit_scale=True, desc="hash files", leave=False) as bar:
        changed = [name for name, sha256 in recorded.items() if file_sha256(export / name, bar.update) != sha256]
    if changed:
        raise Failed(f"{len(changed)} files have changed since the export: {', '.join(sorted(changed)[:3])}")
    return f"{len(recorded)} files as written (SHA-256)"


def _code(export: Path) -> str:
    """What `trust_remote_code=True` will run is this package's code, and nothing else is there to run."""
    for name in export_files.CODE_FILES:
        file = export / name
        if not file.is_file() or file.read_bytes() != (export_files.CODE_DIRECTORY / name).read_bytes():
            raise Failed(
                f"{name} is {'not this release' + chr(39) + 's' if file.is_file() else 'missing'}; export again"
            )
    endings = (".py", ".bin", ".pt", ".pth", ".pkl", ".so")
    others = sorted(item.name for item in export.rglob("*") if item.suffix in endings)
    others = [name for name in others if name not in export_files.CODE_FILES]
    if others:
        raise Failed(f"files that can hold code and are not the export's: {', '.join(others[:3])}; do not load it")
    return "auto_map's files are this release's, no other code, no pickles"


def _tokenizers(export: Path, base: Path) -> tuple:
    from transformers import AutoTokenizer

    try:
        return tuple(AutoTokenizer.from_pretrained(path, trust_remote_code=False) for path in (base, export))
    except Exception as error:  # the tokenizers library raises a plain Exception for a damaged file
        raise Failed(f"a tokenizer does not load: {' '.join(str(error).split())[:300]}") from None


def _tokenizer(export: Path, base: Path) -> str:
    of_base, of_export = _tokenizers(export, base)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = getattr(of_export, name), getattr(of_base, name)
        if ids[0] != ids[1]:
            raise Failed(f"{name} is {ids[0]}, the base's is {ids[1]}")
    text = "Sparse attention: 3 keys, été, 注意力.\n\tEnd"
    if of_export(text)["input_ids"] != of_base(text)["input_ids"]:
        raise Failed("a test text gives other ids than with the base's tokenizer")
    return f"same ids as the base's; bos {of_export.bos_token_id}, eos {of_export.eos_token_id}"


def _chat_template(export: Path, base: Path) -> str:
    of_base, of_export = _tokenizers(export, base)
    if of_base.chat_template is None and of_export.chat_template is None:
        raise Skipped("neither the base nor the export has one; chat training and verl need one")
    if of_base.chat_template != of_export.chat_template:
        raise Failed("it is not the base's")
    try:
        text = of_export.apply_chat_template(_CONVERSATION, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # Jinja's, or whatever a template's expressions raise
        raise Failed(f"it does not render a conversation: {' '.join(str(error).split())[:300]}") from None
    ids = of_export(text, add_special_tokens=False)["input_ids"]
    bos = of_export.bos_token_id
    if ids.count(bos) != 1 or ids[0] != bos:
        raise Failed(f"a rendered conversation holds the bos id {bos} {ids.count(bos)} times and starts with {ids[0]}")
    return f"the base's; a rendered conversation starts with bos {bos} and has it once"


def _loads(export: Path, load: bool, sound: bool) -> str:
    """With our own classes: every key used, every parameter filled, finite logits beyond the top-k where affordable."""
    if not load:
        raise Skipped("left out by --no-load")
    if not sound:
        raise Skipped("not tried, for another check failed")
    from megatron_patch.hf_model import configuration_deepseek_v2_dsa as configurations
    from megatron_patch.hf_model import modeling_deepseek_v2_dsa as models

    native = layout_of(read_config(export)) == NATIVE
    config_class = configurations.DeepseekV32SoftmaxConfig if native else configurations.DeepseekV2DsaConfig
    model_class = models.DeepseekV32ForCausalLM if native else models.DeepseekV2DsaForCausalLM
    config = config_class.from_pretrained(export)
    model, info = model_class.from_pretrained(
        export, config=config, dtype="auto", attn_implementation="eager", output_loading_info=True, use_safetensors=True
    )
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = [name for name in info[fault] if not IGNORED_HF_NAMES.fullmatch(str(name))]
        if names:
            raise Failed(f"transformers reports {len(names)} {fault}: {', '.join(map(str, sorted(names)[:3]))}")
    tokens = min(config.dsa_index_topk + 8, 128)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), check_native.input_variances(model) as variances:
        logits = model.eval()(ids, use_cache=False).logits
    if not logits.isfinite().all():
        raise Failed(f"{int((~logits.isfinite()).sum())} of {logits.numel()} logits are not finite")
    said = f"no missing, unexpected or mismatched key; logits of {tokens} tokens finite"
    return f"{said}; {check_native.describe_eps(variances, config)}" if native else said
