"""A pruned model must equal its source with the dropped experts forbidden: through transformers, in fp32."""

import json

import pytest
import torch

from megatron_patch.pruning import apply, shards
from megatron_patch.pruning.checkpoint import MoeCheckpoint
from megatron_patch.pruning.masked import as_planned
from megatron_patch.pruning.plan_file import Plan, read_plan
from megatron_patch.pruning.verify_logits import logits_and_mass
from megatron_patch.pruning.wish import Wish
from tests.pruning import checkpoints, oracle
from tests.pruning.conftest import make_pruned, prune

TOKENS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(3))


def logits(path) -> torch.Tensor:
    return oracle.logits_of(path, TOKENS)


def masked_logits(model, kept, tables=None) -> torch.Tensor:
    loaded = oracle.load(model)
    with oracle.masked(loaded, kept, tables):
        return logits_and_mass(loaded, TOKENS)[0]


def apart(a, b) -> float:
    return float((a - b).abs().max())


def write_unchecked(checkpoint: MoeCheckpoint, kept: dict[int, list[int]], path):
    """What `apply` would write of a plan that its checks refuse: in the order given, unbalanced over the groups."""
    keep = len(next(iter(kept.values())))
    plan = Plan(keep, kept, True, "keep", {"n_routed_experts": (checkpoints.EXPERTS, keep)}, {}, {})
    path.mkdir()
    names: dict[str, str] = {}
    for shard in shards.output_shards(checkpoint, plan):
        shards.write_shard(checkpoint.path / shard.file, shard, path / shard.file, lambda _: None)
        names |= {tensor.name: shard.file for tensor in shard.tensors}
    apply._write_index(checkpoint, path, names, 0)
    apply._write_config(checkpoint, plan, path)
    return path


def test_pruned_equals_masked(pruned):
    plan = read_plan(pruned.plan, MoeCheckpoint(pruned.model))
    output = MoeCheckpoint(pruned.output)
    tables = {n: torch.tensor(plan.kept[n])[output.load(output.layers[n].table)] for n in plan.tid2eid}
    expected = masked_logits(pruned.model, plan.kept, tables)
    assert apart(logits(pruned.output), expected) < 1e-5
    assert apart(logits(pruned.model), expected) > 1e-2, "the mask does nothing"


@pytest.mark.parametrize("model_type", checkpoints.FAMILIES)
def test_keep_all_gives_the_very_same_logits(tmp_path, model_type):
    made = make_pruned(tmp_path, model_type, Wish(keep=checkpoints.EXPERTS))
    assert torch.equal(logits(made.output), logits(made.model))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32"])
def test_why_groups_keep_the_same_number_in_ascending_order(tmp_path, model_type):
    """Balanced and ascending equals the masked model; unbalanced, or ordered by score, is far away."""
    checkpoint = MoeCheckpoint(checkpoints.make(tmp_path / "m", model_type))
    for name, kept, close in (
        ("balanced", [0, 3, 4, 5, 9, 10, 12, 15], True),
        ("unbalanced", [0, 1, 2, 3, 5, 6, 9, 12], False),
        ("by_score", [15, 0, 9, 4, 3, 12, 10, 5], False),
    ):
        layers = {1: kept, 2: kept}
        path = write_unchecked(checkpoint, layers, tmp_path / name)
        difference = apart(logits(path), masked_logits(checkpoint.path, {n: sorted(k) for n, k in layers.items()}))
        assert difference < 1e-5 if close else difference > 0.1, (name, difference)


def test_v2_with_groups(tmp_path):
    """DeepSeek-V2's own router: a group's score is its best expert."""
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    made = make_pruned(tmp_path, "deepseek_v2", **groups)
    plan = read_plan(made.plan, MoeCheckpoint(made.model))
    assert all(sum(e // 4 == group for e in kept) == 2 for kept in plan.kept.values() for group in range(4))
    assert apart(logits(made.output), masked_logits(made.model, plan.kept)) < 1e-5


def test_flattened_groups_equal_the_masked_model_without_groups(tmp_path):
    made = make_pruned(tmp_path, "deepseek_v3", Wish(keep=7, groups="flatten"))
    plan = read_plan(made.plan, MoeCheckpoint(made.model))
    assert plan.config_changes["n_group"] == (4, 1) and plan.config_changes["topk_group"] == (2, 1)
    loaded = oracle.load(made.model)
    with oracle.masked(loaded, plan.kept), oracle.reconfigured(loaded, plan.config_changes):
        expected = logits_and_mass(loaded, TOKENS)[0]
    assert apart(logits(made.output), expected) < 1e-5


def test_zero_is_no_mask_where_biases_are_negative(pruned):
    """Masking by 0 instead of -inf lets dropped experts win over negative biases."""
    if json.loads((pruned.model / "config.json").read_text())["model_type"] not in ("deepseek_v3", "deepseek_v32"):
        pytest.skip("no bias decides there")
    plan = read_plan(pruned.plan, MoeCheckpoint(pruned.model))
    loaded = oracle.load(pruned.model)
    for number, router in oracle.routers(loaded).items():
        dropped = torch.ones(checkpoints.EXPERTS, dtype=torch.bool)
        dropped[plan.kept[number]] = False
        router.e_score_correction_bias.masked_fill_(dropped, 0.0)
    assert apart(logits_and_mass(loaded, TOKENS)[0], logits(pruned.output)) > 0.1


def test_a_bias_in_bf16_changes_choices():
    """Why biases are copied as bytes: V3.2's are fp32 and around 10, where bf16 has steps of 1/16."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(200, 64, generator=generator).sigmoid()
    bias = 10 + 0.05 * torch.randn(64, generator=generator)
    exact, rounded = ((scores + b).topk(8).indices.sort().values for b in (bias, bias.bfloat16().float()))
    assert (exact != rounded).any()


def test_softmax_mass_grows_when_experts_go(tmp_path):
    """V2-Lite's router is not renormalised: the same tokens get more routed weight. Others keep their mass."""
    for model_type, grows in (("deepseek_v2", True), ("deepseek_v3", False), ("deepseek_v4", False)):
        made = make_pruned(tmp_path / model_type, model_type)
        before, after = (logits_and_mass(oracle.load(p), TOKENS)[1] for p in (made.model, made.output))
        assert after > before * 1.05 if grows else after == pytest.approx(before, rel=1e-5)


def test_the_scale_can_be_corrected_as_an_option(tmp_path):
    """By the ratio of the masses that `verify` prints; off by default."""
    made = make_pruned(tmp_path / "plain", "deepseek_v2")
    before, after = (logits_and_mass(oracle.load(p), TOKENS)[1] for p in (made.model, made.output))
    wish = Wish(keep=8, routed_scaling_factor=before / after)
    corrected = prune(tmp_path, made.model, made.stats, wish)
    plan = read_plan(corrected.plan, MoeCheckpoint(corrected.model))
    assert plan.config_changes["routed_scaling_factor"] == (1.0, before / after)
    loaded = oracle.load(corrected.model)
    with oracle.masked(loaded, plan.kept), oracle.reconfigured(loaded, plan.config_changes):
        expected, mass = logits_and_mass(loaded, TOKENS)
    assert apart(logits(corrected.output), expected) < 1e-5
    assert abs(mass - before) < 0.5 * abs(after - before)  # not equal: inputs of the routers change as well


def test_masks_are_lifted_again(pruned):
    loaded = oracle.load(pruned.model)
    before = logits_and_mass(loaded, TOKENS)[0]
    plan = read_plan(pruned.plan, MoeCheckpoint(pruned.model))
    tables = {number: torch.zeros(96, checkpoints.TOP_K, dtype=torch.int64) for number in plan.tid2eid}
    with oracle.masked(loaded, plan.kept, tables):
        assert apart(logits_and_mass(loaded, TOKENS)[0], before) > 1e-2
    assert torch.equal(logits_and_mass(loaded, TOKENS)[0], before)


def test_v4_with_43_layers_and_more_compress_ratios(tmp_path):
    """The published model's numbers of layers, hash layers and ratios (44 or 46 for 43 layers); widths are small."""
    ratios = [0, 0] + [4, 128] * 22
    numbers = {"num_hidden_layers": 43, "num_hash_layers": 3, "n_routed_experts": 8, "compress_ratios": ratios}
    made = make_pruned(tmp_path / "46", "deepseek_v4", Wish(keep=4), **numbers)
    plan = read_plan(made.plan, MoeCheckpoint(made.model))
    assert sorted(plan.tid2eid) == [0, 1, 2] and len(plan.kept) == 43
    output = MoeCheckpoint(made.output)
    tables = {n: torch.tensor(plan.kept[n])[output.load(output.layers[n].table)] for n in plan.tid2eid}
    expected = masked_logits(made.model, plan.kept, tables)
    assert apart(logits(made.output), expected) < 1e-5 * max(1.0, float(expected.abs().max()))
    config = json.loads((made.model / "config.json").read_text())
    config["compress_ratios"] = ratios[:44]
    (made.model / "config.json").write_text(json.dumps(config))
    again = prune(tmp_path, made.model, made.stats, Wish(keep=4))
    assert json.loads((again.output / "config.json").read_text())["compress_ratios"] == ratios[:44]


@pytest.mark.parametrize("wish", [Wish(keep=8), Wish(keep=12, mtp="scores"), Wish(keep=7, groups="flatten", routed_scaling_factor=2.0)])
@pytest.mark.parametrize("model_type", checkpoints.FAMILIES)
def test_the_dry_run_routes_as_the_plan_says(tmp_path, model_type, wish):
    """Kept experts, groups, scale and hash tables together, of plans with and without MTP layers."""
    model = checkpoints.make(tmp_path / "model", model_type)
    checkpoint = MoeCheckpoint(model)
    if wish.mtp == "scores" and not checkpoint.mtp_layers:
        pytest.skip("no MTP layer")
    layers = tuple(n for n, layer in checkpoint.layers.items() if wish.mtp == "scores" or not layer.mtp)
    made = prune(tmp_path, model, checkpoints.make_statistics(model, tmp_path / "stats", layers=layers), wish)
    loaded, expected = oracle.load(model), logits(made.output)
    whole = logits_and_mass(loaded, TOKENS)[0]
    with as_planned(loaded, checkpoint, read_plan(made.plan, checkpoint)):
        assert apart(logits_and_mass(loaded, TOKENS)[0], expected) < 1e-5 * max(1.0, float(expected.abs().max()))
    assert apart(whole, expected) > 1e-2, "the plan changes nothing"
    assert torch.equal(logits_and_mass(loaded, TOKENS)[0], whole), "the plan must be gone after the block"
