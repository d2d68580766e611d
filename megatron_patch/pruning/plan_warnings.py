"""What a plan costs besides bytes: warnings, each with a code that scripts can look for."""

from megatron_patch.pruning import tid2eid
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.wish import Wish

_ASCEND_EXPERTS = 256


def warnings_of(checkpoint: MoeCheckpoint, wish: Wish, content: dict) -> list[dict]:
    """The `warnings` of plan.json, from its other entries."""
    found: list[tuple[str, str]] = []
    pruned = wish.keep < checkpoint.routing.experts
    layers = content["layers"]
    kept_unseen = {n: len(set(v["never_routed"]) & set(v["kept"])) for n, v in layers.items()}
    if any(kept_unseen.values()):
        worst = max(kept_unseen, key=lambda n: kept_unseen[n])
        found.append((
            "never_routed_kept",
            f"{sum(v > 0 for v in kept_unseen.values())} layers keep experts that the data never routed to ({kept_unseen[worst]} in layer "
            f"{worst}): nothing is known of these, observe more data or keep fewer",
        ))  # fmt: skip
    if any(set(v["never_routed"]) - set(v["kept"]) for v in layers.values()):
        found.append(
            (
                "never_routed_dropped",
                "experts that the data never routed to are dropped: unseen is not useless, other data may need them",
            )
        )
    if pruned and checkpoint.family.router == "softmax" and not checkpoint.family.keeps_mass(checkpoint.config):
        found.append((
            "softmax_mass",
            "the softmax loses the dropped experts from its denominator and is not renormalised: routed weights grow; `prune verify` "
            "prints by how much",
        ))  # fmt: skip
    if checkpoint.mtp_layers and wish.mtp == "drop":
        found.append(
            ("mtp_dropped", f"the MTP layers go ({len(checkpoint.mtp_layers)}): speculative decoding with them ends")
        )
    if wish.groups == "flatten" and checkpoint.routing.n_group > 1:
        found.append(
            (
                "groups_flattened",
                "tokens may choose from all groups: routing differs from the source's even where its experts are kept",
            )
        )
    if wish.target == "ascend" and checkpoint.family.router == "sigmoid" and wish.keep != _ASCEND_EXPERTS:
        found.append((
            "ascend_expert_count",
            f"a gating kernel for Ascend was reported to support {_ASCEND_EXPERTS} experts alone (vllm-ascend issue 5310): {wish.keep} may "
            "need another backend",
        ))  # fmt: skip
    over = [n for n, entry in content["tid2eid"].items() if entry["max_load"] > entry["load_cap"]]
    if over:
        found.append(
            (
                "hash_load",
                f"a survivor of layer {over[0]} carries more than {tid2eid.LOAD_CAP} times the mean load: its own tokens are "
                "that many, or no other had room",
            )
        )
    if any(entry["mean_similarity"] < 0.5 for entry in content["tid2eid"].values()):
        found.append(
            (
                "hash_similarity",
                "survivors that take over token ids in hash layers have unlike router rows (mean cosine under 0.5)",
            )
        )
    return [{"code": code, "text": text} for code, text in found]
