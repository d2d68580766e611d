"""What `pretrain_upcycle.py --train base-indexers` saved, read for an export in the native layout."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron_patch.checkpoint.hf_mapping import HybridMapping, base_indexer_mapping, require_same_names, sizes
from megatron_patch.checkpoint.manifest import (
    WEIGHTS_FILE,
    TrainingManifest,
    iteration_directory,
    read_manifest,
    verify_files,
)
from megatron_patch.config import BASE_INDEXERS
from megatron_patch.errors import UserError
from megatron_patch.io.finite import all_finite
from megatron_patch.io.safetensors_dir import SafetensorsFile
from megatron_patch.model.architecture import Architecture, DsaSettings


@dataclass(frozen=True)
class BaseIndexers:
    """Trained indexers of every layer of a base.

    Attributes:
        manifest: of their checkpoint.
        file: their weights, megatron-core names.
        mapping: to Hugging Face's names.
    """

    manifest: TrainingManifest
    file: SafetensorsFile
    mapping: HybridMapping

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """The tensors of a layer's indexer by Hugging Face name, in the dtype that they were trained in.

        Raises:
            UserError: one of them is not finite.
        """
        found: dict[str, Tensor] = {}
        for name in self.mapping.entries:
            if not name.startswith(f"decoder.layers.{layer}."):
                continue
            tensor = self.file.load(name)
            if not all_finite(tensor):
                raise UserError(
                    f"trained weights must be finite: {name} in {self.file.path} is not; train the base's indexers again"
                )
            found |= self.mapping.to_hf(name, tensor)
        return found

    def record(self) -> dict:
        """For the manifest of an export."""
        return {
            "kind": "trained",
            "iteration": self.manifest.iteration,
            "consumed_tokens": self.manifest.consumed_tokens,
            "sha256": self.manifest.files[WEIGHTS_FILE],
        }


def open_base_indexers(save: str | Path, base_sha256: str, arch: Architecture, dsa: DsaSettings) -> BaseIndexers:
    """The latest checkpoint of a `--train base-indexers` run, checked against what it is to join.

    Args:
        save: the run's --save directory.
        base_sha256, arch: of the base.
        dsa: of the DSA layers. A model has one size of indexers; how many keys they were measured with does not matter,
            for the dense KL that trains them knows no selection.

    Raises:
        UserError: it is no such run, of another base, of other sizes, or damaged.
    """
    directory = iteration_directory(save)
    manifest = read_manifest(directory)
    if manifest.kind != BASE_INDEXERS:
        raise UserError(
            f"--base-indexers is a run of --train base-indexers: {save} trained DSA layers ({manifest.kind}); give it as "
            "--checkpoint, and the indexers' run here"
        )
    wanted = {
        "base": (manifest.base.sha256, base_sha256),
        "--index-n-heads": (manifest.dsa.index_n_heads, dsa.index_n_heads),
        "--index-head-dim": (manifest.dsa.index_head_dim, dsa.index_head_dim),
    }
    for name, (found, value) in wanted.items():
        if found != value:
            raise UserError(
                f"the base's indexers and the DSA layers have one {name}: {save} has {found}, --checkpoint {value}; train the "
                "base's indexers to match"
            )
    verify_files(directory, manifest, only=(WEIGHTS_FILE,))
    file, mapping = SafetensorsFile(directory / WEIGHTS_FILE), base_indexer_mapping(arch)
    require_same_names(str(file.path), mapping.entries, file.names, "train the base's indexers again")
    for hf, shape in mapping.shapes(sizes(arch, dsa)).items():
        name = mapping.megatron_name[hf]
        if file.shape(name) != shape:
            raise UserError(
                f"shapes must agree: {name} in {file.path} is {file.shape(name)}, the base wants {shape}; train the base's "
                "indexers again"
            )
    return BaseIndexers(manifest, file, mapping)
