"""A MoE checkpoint as pruning sees it: every tensor's role, checked to be complete before anything is done with it."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron_patch.errors import UserError
from megatron_patch.io.raw_safetensors import RawFile, RawTensor
from megatron_patch.io.safetensors_dir import INDEX_FILE, SafetensorsDir
from megatron_patch.pruning.config_json import read_config, whole
from megatron_patch.pruning.families import family_of
from megatron_patch.pruning.families.family import Key, Role


@dataclass
class MoeLayer:
    """The tensors of a MoE layer's router and experts.

    Attributes:
        number: of the layer; MTP layers count on after the last ordinary one.
        mtp: whether it is a multi-token-prediction layer.
        router: name of the router's rows, [experts, hidden].
        bias: name of the selection bias, [experts], or None.
        table: name of the token-id-to-experts table, [vocabulary, top_k], or None.
        experts: of each expert number, its tensors' tails and names.
    """

    number: int
    mtp: bool
    router: str = ""
    bias: str | None = None
    table: str | None = None
    experts: dict[int, dict[str, str]] = field(default_factory=dict)


class MoeCheckpoint:
    """A Hugging Face directory of a supported family, scanned: headers only, no weights are read but the hash tables.

    Attributes:
        path, config, family, routing: of the model.
        naming: how its tensors are called.
        tensors: name -> where it lies.
        keys: name -> its parts.
        files: safetensors file -> its header.
        layers: MoE layers by number, MTP layers last.
        sha256: identity: of the index's bytes, or of the single file's header.

    Raises:
        UserError: the family is unknown, or the checkpoint is incomplete, damaged or inconsistent.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = read_config(self.path)
        self.family = family_of(self.config)
        self.routing = self.family.routing(self.config)
        source = SafetensorsDir(self.path)  # refuses a wrong index, a truncated shard, a name in two shards
        self.files = {file: RawFile(self.path / file) for file in source.files}
        self.metadata = source.metadata
        self.tensors: dict[str, RawTensor] = {}
        self._file_of: dict[str, str] = {}
        for file, raw in self.files.items():
            self.tensors |= raw.tensors
            self._file_of |= dict.fromkeys(raw.tensors, file)
        self.naming = self.family.naming_of(self.tensors)
        self._first_mtp = whole(self.config, "num_hidden_layers", least=1)
        self.keys = {name: self.naming.parse(name, self._first_mtp) for name in self.tensors}
        self.layers = self._scan()
        index = self.path / INDEX_FILE
        identity = index.read_bytes() if index.is_file() else next(iter(self.files.values())).header
        self.sha256 = hashlib.sha256(identity).hexdigest()
        self._check_layers()
        self._check_config()
        for layer in self.layers.values():
            self._check_experts(layer)
            self._check_router(layer)

    @property
    def mtp_layers(self) -> tuple[int, ...]:
        """Numbers of the MTP layers that the files hold."""
        numbers = {key.layer for key in self.keys.values() if key.layer is not None and key.layer >= self._first_mtp}
        return tuple(sorted(numbers))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def file_of(self, name: str) -> str:
        """The file that holds a tensor."""
        return self._file_of[name]

    def is_mtp(self, key: Key) -> bool:
        return key.layer is not None and key.layer >= self._first_mtp

    def read(self, name: str) -> bytes:
        """A tensor's bytes."""
        tensor = self.tensors[name]
        with open(self.path / self._file_of[name], "rb") as file:
            file.seek(tensor.start)
            return file.read(tensor.nbytes)

    def load(self, name: str) -> Tensor:
        """A router's tensor or a table, in the dtype of the file.

        Raises:
            UserError: the file has it in a dtype that is none of a router.
        """
        known = {
            "F32": torch.float32,
            "BF16": torch.bfloat16,
            "F16": torch.float16,
            "I64": torch.int64,
            "I32": torch.int32,
        }
        tensor = self.tensors[name]
        if tensor.dtype not in known:
            raise UserError(f"a router's dtype must be one of {', '.join(known)}: {name} is {tensor.dtype}; convert it")
        return torch.frombuffer(bytearray(self.read(name)), dtype=known[tensor.dtype]).reshape(tensor.shape)

    def _scan(self) -> dict[int, MoeLayer]:
        layers: dict[int, MoeLayer] = {}
        for name, key in self.keys.items():
            if key.role is Role.OTHER:
                continue
            layer = layers.setdefault(key.layer, MoeLayer(key.layer, self.is_mtp(key)))
            if key.role is Role.EXPERT:
                layer.experts.setdefault(key.expert, {})[key.tail] = name
            else:
                setattr(layer, key.role.value, name)
        return dict(sorted(layers.items()))

    def _check_layers(self) -> None:
        expected = set(self.family.moe_layers(self.config))
        found = {number for number, layer in self.layers.items() if not layer.mtp}
        if expected != found:
            number = min(expected ^ found)
            state = "has no router and experts" if number in expected else "has them and should not"
            raise UserError(
                f"the MoE layers must be those of config.json: layer {number} {state} in {self.path}; "
                "config and weights are of different models, get them again"
            )
        for number, layer in self.layers.items():
            if not layer.router or not layer.experts:
                what = "a router" if layer.experts else "experts"
                raise UserError(
                    f"a MoE layer must have router and experts: layer {number} lacks {what}; get the files again"
                )
        self._check_unknown(
            {n: self.keys[layer.router].tail.removesuffix(self.naming.router) for n, layer in self.layers.items()}
        )

    def _check_unknown(self, prefixes: dict[int, str]) -> None:
        """A MoE block has nothing that pruning does not know: it might have a row for each expert."""
        for name, key in self.keys.items():
            prefix = prefixes.get(key.layer)
            if key.role is not Role.OTHER or prefix is None or not key.tail.startswith(prefix):
                continue
            if not key.tail.startswith(f"{prefix}shared_experts."):
                leaves = [leaf for leaf in (self.naming.router, self.naming.bias, self.naming.table) if leaf]
                raise UserError(
                    f"every tensor of a MoE block must be known: {name} is not, a {self.family.model_type} has {', '.join(leaves)}, "
                    "experts and shared_experts; check config.json's model_type"
                )

    def _check_config(self) -> None:
        """Lists of modules, as quantised checkpoints have, may not name routed experts: the numbers would change."""
        text = json.dumps({k: v for k, v in self.config.items() if k != "auto_map"})
        named = re.search(r"experts[.\\]+\d+", text)
        if named:
            raise UserError(
                f"config.json may not name single experts, whose numbers change: it has {named[0]}; "
                "remove the entry or use the unquantised model"
            )

    def _check_experts(self, layer: MoeLayer) -> None:
        count, found = self.routing.experts, set(layer.experts)
        where = f"layer {layer.number} of {self.path}"
        if max(found) >= count:
            raise UserError(
                f"experts must be numbered 0 to {count - 1} as config.json's n_routed_experts says: {where} has expert "
                f"{max(found)} of {len(found)}; an earlier pruning did not renumber them, or config.json is another's"
            )
        missing = sorted(set(range(count)) - found)
        if missing:
            raise UserError(
                f"every expert must be there: {where} lacks {len(missing)} of {count}, the first is {missing[0]}; "
                "get its shard again"
            )
        leaves = set().union(*(tails for tails in layer.experts.values()))
        for expert, tails in sorted(layer.experts.items()):
            lacking = sorted(leaves - tails.keys())
            if lacking:
                raise UserError(
                    f"experts must be complete: expert {expert} in {where} lacks {lacking[0][1:]}; get its shard again"
                )
        parts: dict[str, set[str]] = {}
        for tail in leaves:
            projection, _, part = tail[1:].partition(".")
            parts.setdefault(projection, set()).add(part)
        wrong = parts.keys() ^ set(self.naming.projections)
        if wrong or any(frozenset(p) not in self.family.expert_parts for p in parts.values()):
            got = "; ".join(f"{name}: {', '.join(sorted(p))}" for name, p in sorted(parts.items()))
            raise UserError(
                f"an expert must have {', '.join(self.naming.projections)}, each with weight and perhaps a scale: "
                f"{where} has {got}; this quantisation is not supported"
            )
        for tail in leaves:
            forms = {(t.dtype, t.shape) for t in (self.tensors[tails[tail]] for tails in layer.experts.values())}
            if len(forms) > 1:
                raise UserError(
                    f"experts of a layer must have one shape and dtype: {tail[1:]} in {where} has {sorted(forms)}; get them again"
                )

    def _check_kind(self, layer: MoeLayer) -> None:
        """A layer routes by table or by bias, as config.json says; one that lost its bias would be given zeros by a loader."""
        key = self.family.hash_layers_key
        hashed = self.config.get(key) if key else 0
        if layer.mtp:
            return
        if isinstance(hashed, int) and (layer.number < hashed) != (layer.table is not None):
            state = "lacks its table" if layer.table is None else "has a table"
            raise UserError(
                f"layers must be routed as config.json's {key} = {hashed} says: layer {layer.number} of {self.path} {state}; "
                "get the files again"
            )
        if self.naming.bias and layer.table is None and layer.bias is None:
            raise UserError(
                f"a router must have its {self.naming.bias}: layer {layer.number} of {self.path} lacks it; get its shard again"
            )

    def _check_router(self, layer: MoeLayer) -> None:
        count = self.routing.experts
        for name in filter(None, (layer.router, layer.bias)):
            shape = self.tensors[name].shape
            if not shape or shape[0] != count or (name == layer.bias and len(shape) != 1):
                raise UserError(
                    f"a router must have one row and one bias per expert: {name} has shape {list(shape)} for {count} experts; "
                    "an earlier pruning left it at its old length, or config.json is another's"
                )
        self._check_kind(layer)
        if layer.table is None:
            return
        shape = self.tensors[layer.table].shape
        if len(shape) != 2 or shape[1] != self.routing.top_k:
            raise UserError(
                f"a table must be [vocabulary, top_k = {self.routing.top_k}]: {layer.table} is {list(shape)}; get it again"
            )
        table = self.load(layer.table)
        if table.dtype.is_floating_point or int(table.min()) < 0 or int(table.max()) >= count:
            raise UserError(
                f"a table must name experts 0 to {count - 1}: {layer.table} has {table.min().item()} to {table.max().item()}; "
                "an id out of range stops a device, get the file again"
            )
