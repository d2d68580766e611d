"""Write the pruned checkpoint: shard by shard into a hidden directory, which appears under its name when it is complete.

A run that was killed goes on with `--resume`: a journal beside the directory has the hash of every finished shard. The
config and the index come last, so that nothing half-written can be loaded even by its hidden name.
"""

import json
import os
import shutil
from pathlib import Path

from tqdm import tqdm

from megatron_patch.errors import EXIT_OK, UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.publish import atomic_write_json, atomic_write_text, flush, require_empty
from megatron_patch.io.safetensors_dir import INDEX_FILE
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.config_json import CONFIG_FILE
from megatron_patch.pruning.plan_file import Plan, read_plan, same_plan
from megatron_patch.pruning.shards import OutShard, output_shards, write_shard

PLAN_COPY = "prune_plan.json"
EXPORT_MANIFEST = "upcycle_manifest.json"  # of `dsa-upcycle export`
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")


def run(model: str | Path, plan: str | Path, output: str | Path, *, resume: bool = False, progress: bool = True) -> int:
    """`dsa-upcycle prune apply`.

    Args:
        model: the source's directory, which is only read.
        plan: file of `prune plan`.
        output: a new or empty directory, on a local or shared file system; never inside of `model`.
        resume: go on with a run of the same plan that was stopped; one that is complete already is left alone.
        progress: show a bar over the bytes on stderr.

    Returns:
        the exit code.

    Raises:
        UserError: the checkpoint is damaged, the plan is another's, the output is not empty, the disk is too small.
    """
    checkpoint = MoeCheckpoint(model)
    checked = read_plan(plan, checkpoint)
    output = Path(output).absolute()
    if output.resolve().is_relative_to(checkpoint.path.resolve()):
        raise UserError(f"--output must lie outside of --model: {output} lies in {checkpoint.path}; give another path")
    job = _Job(output, checked)
    if resume and job.is_complete():
        job.close()
        print(f"{output} is complete already, of this plan; its files were not read again: `prune verify` does that")
        return EXIT_OK
    require_empty(output)
    job.open(resume)
    _require_space(checked, job)
    weight_map, total, files = _write_shards(checkpoint, checked, job, progress)
    skipped = _copy_others(checkpoint, job.partial, changed=bool(checked.config_changes))
    atomic_write_json(job.partial / PLAN_COPY, checked.content)
    _write_index(checkpoint, job.partial, weight_map, total)
    _write_config(checkpoint, checked, job.partial)
    job.publish()
    for name in skipped:
        print(f"note: {name} was not copied: it is of the model with all experts")
    print(
        f"pruned to {checked.keep} of {checkpoint.routing.experts} experts: {output}, {len(weight_map)} tensors in "
        f"{files} files, {total / 1e9:.3f} GB"
    )
    return EXIT_OK


class _Job:
    """The hidden directory that an output is built in, and the journal beside it."""

    def __init__(self, output: Path, plan: Plan):
        self.output = output
        self.partial = output.parent / f".{output.name}.partial-prune"
        self.journal_file = output.parent / f".{output.name}.partial-prune.json"
        self.plan = plan
        self.done: dict[str, str] = {}

    def is_complete(self) -> bool:
        """Whether the output was published by a run of this plan."""
        file = self.output / PLAN_COPY
        try:
            published = json.loads(file.read_text(encoding="utf-8"))
            return (self.output / CONFIG_FILE).is_file() and same_plan(published, self.plan.content)
        except (OSError, ValueError):
            return False

    def open(self, resume: bool) -> None:
        """Make the directory, or take up the one that is there.

        Raises:
            UserError: a stopped run is there and `resume` is off, or it was one of another plan.
        """
        there = self.partial.exists() or self.journal_file.exists()
        if there and not resume:
            raise UserError(
                f"--output must have no unfinished run: {self.partial} is one; give --resume to go on with it, or remove it "
                f"and {self.journal_file.name}"
            )
        self.output.parent.mkdir(parents=True, exist_ok=True)
        if self.journal_file.exists():
            try:
                journal = json.loads(self.journal_file.read_text(encoding="utf-8"))
                same, self.done = same_plan(journal["plan"], self.plan.content), dict(journal["shards"])
            except (ValueError, KeyError, TypeError):  # a power cut: begin anew
                same = True
            if not same:
                raise UserError(
                    f"--resume must be of the same plan: {self.partial} was begun with another; remove it and "
                    f"{self.journal_file.name}"
                )
        self._save()
        self.partial.mkdir(exist_ok=True)
        for item in self.partial.iterdir():  # halves of the stopped run
            if item.name not in self.done:
                shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()

    def finished(self, file: str) -> bool:
        """Whether a shard is there as it was written: its hash is computed again."""
        path = self.partial / file
        return file in self.done and path.is_file() and file_sha256(path) == self.done[file]

    def finish(self, file: str, written: Path, sha256: str) -> None:
        """Give a written shard its name, then record it."""
        os.replace(written, self.partial / file)
        self.done[file] = sha256
        self._save()

    def publish(self) -> None:
        """Flush everything and give the directory its name; then the journal can go."""
        for item in [*self.partial.rglob("*"), self.partial]:
            flush(item)
        os.replace(self.partial, self.output)
        flush(self.output.parent)
        self.close()

    def close(self) -> None:
        """Remove the journal, and what a kill left of one that was being written."""
        (self.output.parent / f".{self.journal_file.name}.half").unlink(missing_ok=True)
        self.journal_file.unlink(missing_ok=True)

    def _save(self) -> None:
        """Not flushed: a power cut may lose or damage shards, and `finished` sees it; waiting for each would halve the speed."""
        half = self.output.parent / f".{self.journal_file.name}.half"
        half.write_text(json.dumps({"schema": 1, "plan": self.plan.content, "shards": self.done}), encoding="utf-8")
        os.replace(half, self.journal_file)


def _require_space(plan: Plan, job: _Job) -> None:
    there = sum(item.stat().st_size for item in job.partial.rglob("*") if item.is_file())
    need = int(plan.content["bytes"]["after"]) - there
    free = shutil.disk_usage(job.partial).free
    if free < need:
        raise UserError(
            f"the disk must hold the output: {need / 1e9:.1f} GB more are needed, {free / 1e9:.1f} GB are free at "
            f"{job.output.parent}; make room"
        )


def _write_shards(checkpoint: MoeCheckpoint, plan: Plan, job: _Job, progress: bool) -> tuple[dict[str, str], int, int]:
    """Write what is not there yet; returns tensor -> file, bytes of all tensors, number of files."""
    weight_map: dict[str, str] = {}
    total = files = 0
    with tqdm(
        total=int(plan.content["bytes"]["after"]), unit="B", unit_scale=True, desc="prune", disable=not progress
    ) as bar:
        for shard in output_shards(checkpoint, plan):
            _write_one(checkpoint, shard, job, bar)
            weight_map |= {tensor.name: shard.file for tensor in shard.tensors}
            total += shard.nbytes
            files += 1
    return weight_map, total, files


def _write_one(checkpoint: MoeCheckpoint, shard: OutShard, job: _Job, bar: tqdm) -> None:
    if job.finished(shard.file):
        bar.update(shard.nbytes)
        return
    written = job.partial / f".{shard.file}.writing"
    sha256 = write_shard(checkpoint.path / shard.file, shard, written, bar.update)
    job.finish(shard.file, written, sha256)


def _copy_others(checkpoint: MoeCheckpoint, output: Path, *, changed: bool) -> list[str]:
    """Tokenizer, code, README and so on, as new files whatever links the source has.

    Returns:
        What was left out: weights outside of the index, and where the model `changed`, an export's manifest, which holds
        the hashes of the files as they were.
    """
    skipped = []
    written = {CONFIG_FILE, INDEX_FILE, PLAN_COPY, *checkpoint.files}
    for item in sorted(checkpoint.path.rglob("*")):
        name = item.relative_to(checkpoint.path)
        if not item.is_file() or str(name) in written or any(part.startswith(".") for part in name.parts[:-1]):
            continue
        stale = changed and str(name) == EXPORT_MANIFEST
        if stale or item.suffix in WEIGHT_ENDINGS or item.name.endswith(".index.json"):
            skipped.append(str(name))
            continue
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(item, output / name)
    return skipped


def _write_index(checkpoint: MoeCheckpoint, output: Path, weight_map: dict[str, str], total: int) -> None:
    """The new index; byte for byte the source's where no tensor changed its name, place or size."""
    source = checkpoint.path / INDEX_FILE
    if not source.is_file():
        return
    if weight_map == {name: checkpoint.file_of(name) for name in checkpoint.tensors} and total == checkpoint.nbytes:
        shutil.copyfile(source, output / INDEX_FILE)
        return
    metadata = {**checkpoint.metadata, "total_size": total}
    atomic_write_json(output / INDEX_FILE, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def _write_config(checkpoint: MoeCheckpoint, plan: Plan, output: Path) -> None:
    """config.json with the plan's keys and no other changed: transformers would drop some and add others."""
    source = checkpoint.path / CONFIG_FILE
    if not plan.config_changes:
        shutil.copyfile(source, output / CONFIG_FILE)
        return
    config = checkpoint.config | {key: new for key, (_, new) in plan.config_changes.items()}
    atomic_write_text(output / CONFIG_FILE, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
