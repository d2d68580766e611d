"""What `prune verify` claims about an output, a function each: it returns what it saw, or raises how the claim fails."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from megatron_patch.claims import Failed, Skipped
from megatron_patch.io.hashes import file_sha256
from megatron_patch.io.safetensors_dir import INDEX_FILE, SafetensorsDir
from megatron_patch.pruning import tid2eid
from megatron_patch.pruning.apply import PLAN_COPY, WEIGHT_ENDINGS
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.config_json import CONFIG_FILE, read_config
from megatron_patch.pruning.families.family import Role
from megatron_patch.pruning.plan_file import Plan, same_plan

_CHUNK = 8 << 20


@dataclass
class Pair:
    """The source, its plan, and the output, which is scanned when a check first asks."""

    source: MoeCheckpoint
    plan: Plan
    path: Path
    _pruned: MoeCheckpoint | None = None

    @property
    def pruned(self) -> MoeCheckpoint:
        if self._pruned is None:
            pruned = MoeCheckpoint(self.path)
            wrong = pruned.layers.keys() ^ self.plan.kept.keys()
            if wrong:
                raise Failed(f"the MoE layers are not the plan's, the first that differs is {min(wrong)}")
            self._pruned = pruned
        return self._pruned


def _old_name(pair: Pair, name: str) -> str:
    """The source's tensor that a tensor of the pruned checkpoint was copied from.

    Raises:
        Failed: there is none.
    """
    key = pair.pruned.keys[name]
    old = name
    if key.role is Role.EXPERT:
        kept = pair.plan.kept[key.layer]
        old = key.renamed(kept[key.expert]) if key.expert < len(kept) else ""
    if old not in pair.source.tensors:
        raise Failed(f"{name} is of no tensor of the source that the plan keeps")
    return old


def index(pair: Pair) -> str:
    """Index and shards agree, no shard is truncated, and no file with weights lies beside them."""
    directory = SafetensorsDir(pair.path)
    beside = sorted(
        str(item.relative_to(pair.path))
        for item in pair.path.rglob("*")
        if item.suffix in WEIGHT_ENDINGS and item.name not in directory.files
    )
    if beside:
        raise Failed(
            f"{len(beside)} files with weights are not in the index, the first is {beside[0]}: a loader may take them"
        )
    size, same = (
        pair.pruned.nbytes,
        pair.source.nbytes == pair.pruned.nbytes,
    )  # an index that is copied keeps its own sum
    if pair.pruned.metadata.get("total_size") not in (
        None,
        size,
        pair.source.metadata.get("total_size") if same else None,
    ):
        raise Failed(
            f"{INDEX_FILE} says {pair.pruned.metadata['total_size']} bytes, the shards hold {pair.pruned.nbytes}"
        )
    return f"{len(directory)} tensors in {len(directory.files)} files, each in the index and in one file"


def names(pair: Pair) -> str:
    """Exactly the tensors of the plan: every expert 0 to N - 1, no other, nothing of a dropped layer."""
    old = {name: _old_name(pair, name) for name in pair.pruned.tensors}
    stays = set()
    for name, key in pair.source.keys.items():
        if pair.plan.drop_mtp and pair.source.is_mtp(key):
            continue
        if key.role is not Role.EXPERT or key.expert in pair.plan.kept[key.layer]:
            stays.add(name)
    for fault, names in (
        ("missing", stays - set(old.values())),
        ("there but not in the plan", set(old.values()) - stays),
    ):
        if names:
            raise Failed(f"{len(names)} of the source's tensors are {fault}, the first is {min(names)}")
    return f"{len(pair.plan.kept)} MoE layers with experts 0 to {pair.plan.keep - 1}, none missing, none left over"


def shapes(pair: Pair) -> str:
    for name, tensor in pair.pruned.tensors.items():
        before = pair.source.tensors[_old_name(pair, name)]
        rows = pair.pruned.keys[name].role in (Role.ROUTER, Role.BIAS)
        shape = (pair.plan.keep, *before.shape[1:]) if rows else before.shape
        if (tensor.dtype, tensor.shape) != (before.dtype, shape):
            raise Failed(f"{name} is {tensor.dtype} {list(tensor.shape)}, must be {before.dtype} {list(shape)}")
    return "of the source's dtypes; routers and biases have one row per expert that is kept"


def kept_bytes(pair: Pair) -> str:
    """Every tensor that is copied whole, bit for bit."""
    names = [n for n, key in pair.pruned.keys.items() if key.role in (Role.EXPERT, Role.OTHER)]
    total = sum(pair.pruned.tensors[name].nbytes for name in names)
    with tqdm(total=total, unit="B", unit_scale=True, desc="compare", leave=False, disable=None) as bar:
        for name in names:
            for ours, theirs in zip(_pieces(pair.pruned, name), _pieces(pair.source, _old_name(pair, name))):
                if ours != theirs:
                    raise Failed(f"{name} differs from the source's {_old_name(pair, name)}")
                bar.update(len(ours))
    return f"{len(names)} tensors, {total / 1e9:.3f} GB, bit-identical to the source's"


def _pieces(checkpoint: MoeCheckpoint, name: str) -> Iterator[bytes]:
    tensor = checkpoint.tensors[name]
    with open(checkpoint.path / checkpoint.file_of(name), "rb") as file:
        file.seek(tensor.start)
        for offset in range(0, tensor.nbytes, _CHUNK):
            yield file.read(min(_CHUNK, tensor.nbytes - offset))


def router_rows(pair: Pair) -> str:
    """Row n of every router and bias is the source's row of the expert that became n."""
    count = 0
    for number, layer in pair.pruned.layers.items():
        before = pair.source.layers[number]
        for name, old in ((layer.router, before.router), (layer.bias, before.bias)):
            if (name is None) != (old is None):
                raise Failed(f"layer {number} has {'lost' if name is None else 'gained'} its bias")
            if name is None:
                continue
            rows = pair.source.read(old)
            size = len(rows) // pair.source.routing.experts
            expected = b"".join(rows[size * e : size * (e + 1)] for e in pair.plan.kept[number])
            if pair.pruned.read(name) != expected:
                raise Failed(f"{name} is not the rows of the experts that are kept")
            count += 1
    return f"{count} router weights and biases, bit-identical to the source's rows"


def tables(pair: Pair) -> str:
    hashed = {n: layer.table for n, layer in pair.pruned.layers.items() if layer.table}
    if not hashed:
        raise Skipped("no layer is routed by token id")
    for number, name in hashed.items():
        table = pair.pruned.load(name)
        fault = tid2eid.faults(table, pair.plan.keep)
        if fault:
            raise Failed(f"{name}: {fault}")
        if number in pair.plan.tid2eid:
            if tid2eid.table_sha256(table) != pair.plan.tid2eid[number]["sha256"]:
                raise Failed(f"{name} is not the table of the plan")
            _check_survivors(pair, number, name)
        elif hashlib.sha256(pair.pruned.read(name)).digest() != hashlib.sha256(pair.source.read(name)).digest():
            raise Failed(f"{name} differs from the source's")
    return f"{len(hashed)} tables: every row names {pair.source.routing.top_k} distinct experts that are kept"


def _check_survivors(pair: Pair, number: int, name: str) -> None:
    """Experts that are kept keep their token ids."""
    before = pair.source.load(pair.source.layers[number].table).long()
    after = torch.tensor(pair.plan.kept[number])[pair.pruned.load(name).long()]
    kept = torch.isin(before, torch.tensor(pair.plan.kept[number]))
    lost = (kept & ~(before.unsqueeze(2) == after.unsqueeze(1)).any(2)).any(1).nonzero()
    twice = (before.sort(1).values.diff(dim=1) == 0).any(1)  # the source's own fault
    lost = [int(row) for row in lost if not twice[int(row)]]
    if lost:
        raise Failed(f"{name}: token {lost[0]} lost an expert that is kept")


def config(pair: Pair) -> str:
    """Equal to the source's but for the plan's keys."""
    config = read_config(pair.path)
    expected = pair.source.config | {key: new for key, (_, new) in pair.plan.config_changes.items()}
    differing = sorted(k for k in config.keys() | expected.keys() if config.get(k, Failed) != expected.get(k, Failed))
    if differing:
        shown = "; ".join(
            f"{k}: {config.get(k, '(absent)')!r}, not {expected.get(k, '(absent)')!r}" for k in differing[:4]
        )
        raise Failed(f"{len(differing)} keys are not as the plan says: {shown}")
    return "differs from the source's in " + (", ".join(pair.plan.config_changes) or "nothing")


def other_files(pair: Pair) -> str:
    """Every other file of the source is there unchanged, and the plan is the plan."""
    copied = 0
    for item in sorted(pair.source.path.rglob("*")):
        name = item.relative_to(pair.source.path)
        own = (
            item.suffix in WEIGHT_ENDINGS or item.name.endswith(".index.json") or str(name) in (CONFIG_FILE, PLAN_COPY)
        )
        if own or not item.is_file() or any(part.startswith(".") for part in name.parts[:-1]):
            continue
        twin = pair.path / name
        if not twin.is_file() or file_sha256(twin) != file_sha256(item):
            raise Failed(f"{name} is {'not the source' + chr(39) + 's' if twin.is_file() else 'missing'}")
        if twin.samefile(item):
            raise Failed(f"{name} is one file with the source's: a change of one would change the other")
        copied += 1
    try:
        same = same_plan(json.loads((pair.path / PLAN_COPY).read_text(encoding="utf-8")), pair.plan.content)
    except (OSError, ValueError):
        same = False
    if not same:
        raise Failed(f"{PLAN_COPY} is missing or another plan")
    return f"{copied} files as in the source"
