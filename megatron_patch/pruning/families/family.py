"""The vocabulary in which a family is described, and how its tensors' names and its config are read with it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from megatron_patch.errors import UserError
from megatron_patch.pruning.config_json import whole
from megatron_patch.pruning.feasibility import Routing


class Role(Enum):
    """What pruning does to a tensor."""

    EXPERT = "expert"  # dropped, or copied under its new number
    ROUTER = "router"  # [experts, hidden]: rows are taken
    BIAS = "bias"  # [experts]: entries are taken
    TABLE = "table"  # [vocabulary, top_k] of expert ids: rewritten
    OTHER = "other"  # copied


@dataclass(frozen=True)
class Key:
    """A tensor's name, taken apart.

    Attributes:
        role: what pruning does to it.
        layer: number of the layer; MTP layers count on after the last ordinary one. None outside of layers.
        expert: number of the routed expert.
        tail: what follows the expert's number, or the layer's prefix.
        head: what stands before the expert's number.
    """

    role: Role
    layer: int | None = None
    expert: int | None = None
    tail: str = ""
    head: str = ""

    def renamed(self, expert: int) -> str:
        """The name of the same tensor of another expert."""
        return f"{self.head}{expert}{self.tail}"


@dataclass(frozen=True)
class Naming:
    """One way in which a family's tensors are called.

    Attributes:
        name: for messages.
        layer: regular expression of a layer's prefix with one group, the layer's number.
        mtp: the same for MTP layers with a prefix of their own; None: they are layers past `num_hidden_layers`.
        moe: what follows the prefix in a MoE block.
        projections: the matrices of an expert.
        router, bias, table: leaves of the router; `bias` and `table` where there are some.
    """

    name: str
    layer: str
    mtp: str | None
    moe: str
    projections: tuple[str, ...]
    router: str
    bias: str | None
    table: str | None

    @cached_property
    def _expert(self) -> re.Pattern:
        return re.compile(rf"{re.escape(self.moe)}experts\.(\d+)(\..*)")

    def parse(self, name: str, num_layers: int) -> Key:
        """Take a tensor's name apart; what is not in a MoE block is `Role.OTHER`."""
        for pattern, first in ((self.layer, 0), (self.mtp, num_layers)):
            match = re.match(pattern, name) if pattern else None
            if match:
                return self._parse_in_layer(name, match.end(), int(match[1]) + first)
        return Key(Role.OTHER)

    def _parse_in_layer(self, name: str, start: int, layer: int) -> Key:
        rest = name[start:]
        expert = self._expert.fullmatch(rest)
        if expert:
            head = name[: start + expert.start(1)]
            return Key(Role.EXPERT, layer, int(expert[1]), expert[2], head)
        for role, leaf in ((Role.ROUTER, self.router), (Role.BIAS, self.bias), (Role.TABLE, self.table)):
            if leaf is not None and rest == self.moe + leaf:
                return Key(role, layer, tail=rest)
        return Key(Role.OTHER, layer, tail=rest)


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        model_type: of config.json.
        model_class: transformers' class. Named, not found through auto_map: a published checkpoint may bring code of its
            own, which is never run.
        namings: the ways in which its tensors are called; a checkpoint uses one.
        router: the function of the router's logits: softmax | sigmoid | sqrtsoftplus.
        normalised: chosen weights are divided by their sum, so that dropping experts leaves the routed mass alone.
            None: the config's `norm_topk_prob` says so.
        group_members: how many of a group's experts make its score; 0: the family routes without groups.
        grouped_when: (key, value) of config.json that switches groups on; None: `n_group` alone does.
        expert_parts: what an expert's matrix consists of: the sets of leaves that may occur, e.g. weight and scale.
        all_moe: every layer is a MoE layer; else `first_k_dense_replace` and `moe_layer_freq` say which.
        hash_layers_key: key of config.json with the number of leading layers that are routed by token id.
    """

    model_type: str
    model_class: str
    namings: tuple[Naming, ...]
    router: str
    normalised: bool | None
    group_members: int
    grouped_when: tuple[str, str] | None
    expert_parts: tuple[frozenset[str], ...]
    all_moe: bool = False
    hash_layers_key: str | None = None

    def naming_of(self, names: Iterable[str]) -> Naming:
        """The naming that a checkpoint uses.

        Raises:
            UserError: no naming finds experts, or more than one does.
        """
        names = list(names)
        # By ordinary layers: MTP layers may be called alike in several namings.
        found = [
            n for n in self.namings if any(re.match(n.layer, x) and n.parse(x, 0).role is Role.EXPERT for x in names)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError(
                f"tensors must be named in one way: found {' and '.join(n.name for n in found)} names; "
                "the files are of different conversions, get them again"
            )
        fused = next((name for name in names if re.search(r"\.experts\.[a-z]", name)), None)
        if fused is not None:
            raise UserError(
                f"each expert must have its own tensors: {fused} holds all experts in one; use the published files, "
                "or save the model with transformers 5, which writes them apart"
            )
        known = ", ".join(n.moe + "experts.N." + n.projections[0] for n in self.namings)
        raise UserError(
            f"a {self.model_type} checkpoint must hold routed experts ({known}): there are none; give another model"
        )

    def routing(self, config: dict) -> Routing:
        """Sizes of the router.

        Raises:
            UserError: a number is missing or is none.
        """
        experts = whole(config, "n_routed_experts", least=1)
        top_k = whole(config, "num_experts_per_tok", least=1)
        grouped = self.group_members > 0 and (
            self.grouped_when is None or config.get(self.grouped_when[0]) == self.grouped_when[1]
        )
        n_group = whole(config, "n_group", least=1, default=1) if grouped else 1
        topk_group = whole(config, "topk_group", least=1, default=1) if grouped else 1
        if experts % n_group or topk_group > n_group or top_k > experts:
            raise UserError(
                f"config.json must be of one router: {experts} experts, top {top_k}, {n_group} groups of which "
                f"{topk_group}; it is damaged, get it again"
            )
        return Routing(experts, top_k, n_group, topk_group, self.group_members if n_group > 1 else 0)

    def moe_layers(self, config: dict) -> tuple[int, ...]:
        """Numbers of the MoE layers, MTP not included."""
        count = whole(config, "num_hidden_layers", least=1)
        if self.all_moe:
            return tuple(range(count))
        types = config.get("mlp_layer_types")
        if isinstance(types, list):
            return tuple(i for i, kind in enumerate(types[:count]) if kind != "dense")
        first = whole(config, "first_k_dense_replace", least=0, default=0)
        every = whole(config, "moe_layer_freq", least=1, default=1)
        return tuple(i for i in range(first, count) if i % every == 0)

    def keeps_mass(self, config: dict) -> bool:
        """Whether the chosen experts' weights sum to the same after pruning."""
        return bool(config.get("norm_topk_prob")) if self.normalised is None else self.normalised


def unsupported(model_type: object, known: Iterable[str]) -> UserError:
    """The refusal of a `model_type`."""
    return UserError(
        f"model_type must be one that pruning knows: {model_type!r} is not supported; known are {', '.join(known)}"
    )


# The names that Hugging Face's DeepSeek-V2, V3 and V3.2 checkpoints share.
HF_NAMING = Naming(
    name="model.layers.N.mlp",
    layer=r"model\.layers\.(\d+)\.",
    mtp=None,
    moe="mlp.",
    projections=("gate_proj", "up_proj", "down_proj"),
    router="gate.weight",
    bias="gate.e_score_correction_bias",
    table=None,
)
