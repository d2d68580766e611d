"""Training that starts from an export: the DSA layers of a Hugging Face directory, checked like a checkpoint."""

from pathlib import Path

from torch import nn

from megatron_patch.checkpoint.export import MANIFEST_FILE
from megatron_patch.checkpoint.layouts import NATIVE, layout_of
from megatron_patch.checkpoint.load_base import LoadReport, load_trained_from_export
from megatron_patch.checkpoint.save import Identity
from megatron_patch.config import BASE_INDEXERS
from megatron_patch.errors import UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.safetensors_dir import SafetensorsDir
from megatron_patch.io.strict_json import read_json
from megatron_patch.model.architecture import Architecture, read_config


def is_export(path: Path) -> bool:
    """Whether `dsa-upcycle export` wrote this directory."""
    return (path / MANIFEST_FILE).is_file()


def load_export_weights(
    export: Path, model: nn.Module, identity: Identity, arch: Architecture, experts: range | None = None
) -> LoadReport:
    """Fill the trainable parameters of `model` from an export of the same base and structure.

    Args:
        export: directory that `dsa-upcycle export` wrote, in either layout; its weight files are compared with their recorded hashes.
        model: bare megatron-core model with DSA layers.
        identity: of the run.
        arch: the base's.
        experts: global numbers of those that this rank holds; None: all.

    Raises:
        UserError: the export is of another base or structure, or a weight file has changed since.
    """
    if identity.kind == BASE_INDEXERS:
        raise UserError(
            f"base indexers start from nothing or from a run of their own: {export} is an export; leave "
            "--pretrained-checkpoint out, or give the --save directory of a --train base-indexers run"
        )
    recorded = _read_manifest(export)
    dsa = identity.dsa
    wanted = {
        "base": (identity.base_sha256, "--base-model"),
        "layer_pattern": (list(identity.layer_pattern), "--dsa-layers"),
        "dsa": (vars(dsa) | {"q_rank": identity.q_rank}, "the --index-* flags"),
    }
    for name, (value, flag) in wanted.items():
        found = recorded["base"]["sha256"] if name == "base" else recorded[name]
        if found != value:
            raise UserError(f"an export belongs to one {name}: {export} has {found}, the run {value}; change {flag}")
    for name in SafetensorsDir(export).files:
        if file_sha256(export / name) != recorded["files"].get(name):
            raise UserError(f"an export's files must be as written: {export / name} has changed; export it again")
    native = layout_of(read_config(export)) == NATIVE
    pattern = identity.layer_pattern
    return load_trained_from_export(model, export, arch, pattern, native=native, local_experts=experts)


def _read_manifest(export: Path) -> dict:
    file = export / MANIFEST_FILE
    try:
        content = read_json(file)
        _ = content["base"]["sha256"], content["layer_pattern"], content["dsa"], content["files"].items()
        return content
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"an export's manifest must be whole: {file}: {error}; export it again") from None
