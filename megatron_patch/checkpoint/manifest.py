"""`manifest.json` of a training checkpoint: which base, which layers, how far, and the hashes of the files beside it.

SAVE/latest_checkpointed_iteration.txt     "100"
SAVE/iter_0000100/model.safetensors        what trains, megatron-core names
SAVE/iter_0000100/optimizer_rank0000.safetensors, training.pt       see `checkpoint.save`
SAVE/iter_0000100/manifest.json
"""

import re
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

from megatron_patch.config import BASE_INDEXERS, PRETRAIN, SFT
from megatron_patch.errors import UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.publish import atomic_write_json
from megatron_patch.io.strict_json import read_json
from megatron_patch.model.architecture import DsaSettings

SCHEMA = 1
MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "model.safetensors"
TRAINING_FILE = "training.pt"
OPTIMIZER_FILE, OPTIMIZER_FILES = "optimizer_rank{:04d}.safetensors", "optimizer_rank*.safetensors"
LATEST_FILE = "latest_checkpointed_iteration.txt"
KINDS = (PRETRAIN, SFT, BASE_INDEXERS)


@dataclass(frozen=True)
class BaseReference:
    """The base that a checkpoint belongs to: where it was, and `io.hashes.directory_identity` of it."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Layout:
    """The ranks that a checkpoint was written by: a record, for it does not decide who can read it.

    Attributes:
        data_parallel: ranks that shared the global batch.
        distributed_optimizer: whether each of them held a part of the optimizer's state.
        expert_parallel: ranks over which the experts of a layer were spread.
    """

    data_parallel: int = 1
    distributed_optimizer: bool = False
    expert_parallel: int = 1


@dataclass(frozen=True)
class TrainingManifest:
    """The manifest's content.

    Attributes:
        kind: "pretrain" or "sft": DSA layers trained so; "base-indexers": indexers beside the base's layers alone.
        iteration: optimizer steps done.
        consumed_samples, consumed_tokens: since the start of this run; tokens without padding.
        base: the frozen model underneath.
        layer_pattern: attention of each layer, bottom to top.
        dsa: sizes of the indexers.
        q_rank: width of the DSA layers' query latent.
        frozen_sha256: hash of all frozen parameters and buffers.
        files: plain file name -> SHA-256, of every file beside the manifest.
        skipped: steps whose gradients were not finite.
        layout: of the ranks that wrote it.
    """

    kind: str
    iteration: int
    consumed_samples: int
    consumed_tokens: int
    base: BaseReference
    layer_pattern: tuple[str, ...]
    dsa: DsaSettings
    q_rank: int
    frozen_sha256: str
    files: dict[str, str]
    skipped: int = 0
    layout: Layout = Layout()

    @property
    def optimizer_files(self) -> list[str]:
        """Files that hold the optimizer's state, together."""
        return sorted(name for name in self.files if fnmatch(name, OPTIMIZER_FILES))

    def write(self, directory: str | Path) -> None:
        """Write `manifest.json` into the directory of an iteration."""
        content = {"schema": SCHEMA, **asdict(self)}
        content["layer_pattern"] = list(self.layer_pattern)
        content["dsa"] |= {"q_rank": content.pop("q_rank")}
        atomic_write_json(Path(directory) / MANIFEST_FILE, content)


def read_manifest(directory: str | Path) -> TrainingManifest:
    """The manifest in the directory of an iteration.

    Raises:
        UserError: there is none, or it is not of this schema.
    """
    file = Path(directory) / MANIFEST_FILE
    try:
        content = read_json(file)
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema is {content['schema']}, this release reads {SCHEMA}")
        if content["kind"] not in KINDS:
            raise ValueError(f"kind is {content['kind']!r}, must be one of {KINDS}")
        for key, kind in (("layer_pattern", list), ("files", dict), ("base", dict), ("dsa", dict)):
            if not isinstance(content[key], kind):
                raise TypeError(f"{key} is {content[key]!r}")
        if not all(isinstance(item, str) for key in ("base", "files") for item in content[key].values()):
            raise TypeError("a path or hash of base or files is no text")
        dsa = dict(content["dsa"])
        return TrainingManifest(
            kind=content["kind"],
            iteration=int(content["iteration"]),
            consumed_samples=int(content["consumed_samples"]),
            consumed_tokens=int(content["consumed_tokens"]),
            base=BaseReference(**content["base"]),
            layer_pattern=tuple(content["layer_pattern"]),
            q_rank=int(dsa.pop("q_rank")),
            dsa=DsaSettings(**dsa),
            frozen_sha256=str(content["frozen_sha256"]),
            files=dict(content["files"]),
            skipped=int(content.get("skipped", 0)),
            layout=Layout(**content.get("layout", {})),
        )
    except FileNotFoundError:
        raise UserError(
            f"a checkpoint must hold {MANIFEST_FILE}: {directory} has none; give a whole checkpoint"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        detail = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"a manifest must be whole: {file}: {detail}; copy the checkpoint again") from None


def verify_files(directory: str | Path, manifest: TrainingManifest, only: tuple[str, ...] | None = None) -> None:
    """Compare the files that the manifest names (or `only` these) with their hashes.

    Raises:
        UserError: a file is missing or has changed, or the manifest does not name one of `only`.
    """
    for name in manifest.files if only is None else only:
        if name not in manifest.files:
            raise UserError(f"a manifest names its files: that of {directory} lacks {name}; copy the checkpoint again")
        expected = manifest.files[name]
        file = Path(directory) / name
        if Path(name).name != name:
            raise UserError(f"a manifest names files beside it: {directory} has {name!r}; copy the checkpoint again")
        if not file.is_file() or file_sha256(file) != expected:
            raise UserError(
                f"a checkpoint's files must be as saved: {file} {'has changed' if file.is_file() else 'is missing'}; "
                "copy the checkpoint again or use another iteration"
            )


def require_base(manifest: TrainingManifest, base: Path, identity: str) -> None:
    """Refuse another base than the one that a checkpoint was trained on.

    Args:
        identity: `io.hashes.directory_identity` of `base`.

    Raises:
        UserError: it is another.
    """
    if manifest.base.sha256 != identity:
        raise UserError(
            f"--base must be the base that the checkpoint was trained on: it was {manifest.base.path} "
            f"(sha256 {manifest.base.sha256[:12]}), {base} is another (sha256 {identity[:12]}); give the former"
        )


def saved_iterations(save: str | Path) -> list[int]:
    """Numbers of the iterations in a --save directory, ascending."""
    found = (re.fullmatch(r"iter_(\d{7,})", item.name) for item in Path(save).glob("iter_*") if item.is_dir())
    return sorted(int(match[1]) for match in found if match)


def iteration_path(save: str | Path, iteration: int) -> Path:
    """Where an iteration's checkpoint stands, or will stand."""
    return Path(save) / f"iter_{iteration:07d}"


def iteration_directory(save: str | Path, iteration: int | None = None) -> Path:
    """Directory of an iteration in a --save directory; None: the one that `latest_checkpointed_iteration.txt` names.

    Raises:
        UserError: it does not exist; the message lists those that do.
    """
    save = Path(save)
    there = f"{save} has {saved_iterations(save) or 'none'}"
    if iteration is None:
        try:
            iteration = int((save / LATEST_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"a --save directory has {LATEST_FILE}: {there}; give the --save directory of a run"
            ) from None
        except ValueError:
            raise UserError(f"{LATEST_FILE} must hold a number: that of {save} does not; write in one of those: {there}") from None
    directory = iteration_path(save, iteration)
    if not directory.is_dir():
        raise UserError(
            f"the iteration must have been saved: {iteration} was not, {there}; export takes another by --iteration, training by its "
            f"number in {LATEST_FILE}"
        )
    return directory
