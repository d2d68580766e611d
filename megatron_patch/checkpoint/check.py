"""Is an export what it claims to be? Compared with its base from the files, then loaded with transformers.

No code of the export runs: its Python files must equal this package's, and those are what loads it.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_patch.checkpoint import export_files
from megatron_patch.checkpoint.export import MANIFEST_FILE
from megatron_patch.checkpoint.hf_mapping import hybrid_mapping, require_same_names, sizes
from megatron_patch.checkpoint.load_base import IGNORED_HF_NAMES
from megatron_patch.claims import Failed, Skipped, all_hold, examine, print_table, say_failures
from megatron_patch.errors import EXIT_OK, EXIT_USER
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.publish import atomic_write_json
from megatron_patch.io.safetensors_dir import SafetensorsDir
from megatron_patch.io.strict_json import read_json
from megatron_patch.model.architecture import DsaSettings, read_architecture, read_config
from megatron_patch.model.layer_pattern import appended_pattern

SCHEMA = 1
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
    read_config(export)
    claims: list[tuple[str, Callable[[], str]]] = [
        ("config", lambda: _config(export, base)),
        ("tensor names", lambda: _names(export, base)),
        ("base tensors", lambda: _base_bytes(export, base_tensors)),
        ("DSA tensors", lambda: _dsa_tensors(export, base)),
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
    print(
        "Load it with trust_remote_code=True. Without, transformers raises no error: its stock class takes the "
        "directory with a random query projection in the DSA layers and dense attention, and gives wrong results."
    )
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


def _dsa_settings(export: Path) -> tuple[DsaSettings, int, int]:
    """(indexer sizes, latent width, number of DSA layers) that the export's config claims."""
    config = read_config(export)
    keys = ("dsa_index_topk", "dsa_index_n_heads", "dsa_index_head_dim", "dsa_q_rank")
    values = [config.get(key) for key in keys]
    layers = config.get("dsa_layers")
    if not isinstance(layers, list) or not all(isinstance(v, int) and v > 0 for v in values):
        raise Failed(f"config.json lacks whole numbers in {', '.join(keys)} or a list in dsa_layers")
    return DsaSettings(*values[:3]), values[3], len(layers)


def _config(export: Path, base: Path) -> str:
    """Equal to what the exporter would write now; so every other key is the base's."""
    config, base_config = read_config(export), read_config(base)
    dsa, q_rank, num_dsa = _dsa_settings(export)
    pattern = appended_pattern(base_config["num_hidden_layers"], num_dsa)
    expected = export_files.export_config(base_config, pattern, dsa, q_rank)
    differing = sorted(k for k in config.keys() | expected.keys() if config.get(k, Failed) != expected.get(k, Failed))
    if differing:
        shown = "; ".join(
            f"{k}: {config.get(k, '(absent)')!r}, not {expected.get(k, '(absent)')!r}" for k in differing[:4]
        )
        raise Failed(f"{len(differing)} keys are not the base's with the DSA layers added: {shown}")
    changed = sorted(k for k in expected if base_config.get(k, Failed) != expected[k])
    return f"one architecture, {export_files.ARCHITECTURE}; differs from the base's only in {', '.join(changed)}"


def _names(export: Path, base: Path) -> str:
    arch = read_architecture(base)
    num_dsa = _dsa_settings(export)[2]
    mapping = hybrid_mapping(arch, appended_pattern(arch.num_layers, num_dsa))
    found = [name for name in SafetensorsDir(export) if not IGNORED_HF_NAMES.fullmatch(name)]
    require_same_names(str(export), mapping.hf_names, found, "export again")
    return f"{len(found)}, none missing, none extra"


def _base_bytes(export: Path, base: SafetensorsDir) -> str:
    """Every tensor of the base, bit for bit (as bytes: NaN and negative zero count)."""
    tensors = SafetensorsDir(export)
    total = sum(base.nbytes(name) for name in base)
    with tqdm(total=total, unit="B", unit_scale=True, desc="compare with base", leave=False) as bar:
        differing = []
        for name in base:
            if name not in tensors or not _same_bits(base.load(name), tensors.load(name)):
                differing.append(name)
            bar.update(base.nbytes(name))
    if differing:
        raise Failed(f"{len(differing)} of {len(base)} differ from the base's, the first is {differing[0]}")
    return f"{len(base)} tensors, {total / 1e9:.3f} GB, bit-identical to the base's"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _dsa_tensors(export: Path, base: Path) -> str:
    arch = read_architecture(base)
    dsa, q_rank, num_dsa = _dsa_settings(export)
    if q_rank != arch.hidden_size:
        raise Failed(f"dsa_q_rank is {q_rank}, must be the hidden size {arch.hidden_size}")
    shapes = hybrid_mapping(arch, appended_pattern(arch.num_layers, num_dsa)).shapes(sizes(arch, dsa))
    of_base = set(hybrid_mapping(arch, appended_pattern(arch.num_layers, 0)).hf_names)
    tensors, count = SafetensorsDir(export), 0
    for name, shape in shapes.items():
        if name in of_base:
            continue
        if name not in tensors:
            raise Failed(f"{name} is missing")
        if tensors.shape(name) != shape:
            raise Failed(f"{name} has shape {tensors.shape(name)}, must be {shape}")
        tensor = tensors.load(name)
        if not tensor.isfinite().all():
            raise Failed(f"{name} holds {int((~tensor.isfinite()).sum())} values that are not finite")
        count += tensor.numel()
    return f"{num_dsa} layers, {count:,} parameters, right shapes, finite"


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
    from megatron_patch.hf_model.configuration_deepseek_v2_dsa import DeepseekV2DsaConfig
    from megatron_patch.hf_model.modeling_deepseek_v2_dsa import DeepseekV2DsaForCausalLM

    config = DeepseekV2DsaConfig.from_pretrained(export)
    model, info = DeepseekV2DsaForCausalLM.from_pretrained(
        export, config=config, dtype="auto", attn_implementation="eager", output_loading_info=True, use_safetensors=True
    )
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = [name for name in info[fault] if not IGNORED_HF_NAMES.fullmatch(str(name))]
        if names:
            raise Failed(f"transformers reports {len(names)} {fault}: {', '.join(map(str, sorted(names)[:3]))}")
    tokens = min(config.dsa_index_topk + 8, 128)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model.eval()(ids, use_cache=False).logits
    if not logits.isfinite().all():
        raise Failed(f"{int((~logits.isfinite()).sum())} of {logits.numel()} logits are not finite")
    return f"no missing, unexpected or mismatched key; logits of {tokens} tokens finite"
