"""Infeasible numbers are refused before anything expensive: transformers takes some of them and routes wrongly."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_patch.errors import UserError
from megatron_patch.pruning.feasibility import Routing, broken_rules, check_feasible, check_protected, feasible
from megatron_patch.pruning.wish import Wish, check_only
from tests.pruning import checkpoints

ROOT = Path(__file__).parents[2]
V32 = Routing(experts=256, top_k=8, n_group=8, topk_group=4, group_members=2)
LITE = Routing(experts=64, top_k=6, n_group=1, topk_group=1, group_members=0)


@pytest.mark.parametrize(
    "routing, keep, options, words",
    [
        (
            V32,
            100,
            {},
            ["divisible by n_group = 8", "--keep 100 of 256", "nearest feasible: 104 or 96", "or --groups flatten"],
        ),
        (V32, 8, {}, ["8/8 = 1", "4 * 8/8 = 4 experts are in reach", "nearest feasible: 16"]),
        (V32, 128, {"ep": 24}, ["divisible by --ep 24", "nearest feasible: 120 or 144"]),
        (V32, 0, {}, ["1 <= experts kept <= 256"]),
        (V32, 257, {"groups": "flatten"}, ["1 <= experts kept <= 256", "nearest feasible: 256"]),
        (V32, 4, {"groups": "flatten"}, ["top_k = 8", "nearest feasible: 8"]),
        (LITE, 5, {}, ["experts kept >= top_k = 6", "nearest feasible: 6"]),
        (LITE, 48, {"ep": 100}, ["divisible by --ep 100", "no number is feasible"]),
        (Routing(256, 8, 8, 2, 2), 24, {}, ["2 * 24/8 = 6 experts are in reach", "nearest feasible: 32"]),
    ],
)
def test_refusals_name_rule_value_and_the_nearest_number(routing, keep, options, words):
    with pytest.raises(UserError) as error:
        check_feasible(routing, keep, **options)
    assert all(word in str(error.value) for word in words), error.value


def test_numbers_for_32_npus_are_multiples_of_32():
    assert feasible(V32, ep=32) == list(range(32, 257, 32))


def test_protect_list_must_exist_and_fit():
    check_protected(V32, 16, [0, 1], 3, "keep")
    with pytest.raises(UserError, match="3 are protected in group 0 of layer 3, 2 are kept"):
        check_protected(V32, 16, [0, 1, 31], 3, "keep")
    check_protected(V32, 16, [0, 1, 31], 3, "flatten")
    with pytest.raises(UserError, match="experts 0 to 255: layer 3 has no expert 256"):
        check_protected(V32, 16, [256], 3, "keep")


def test_check_only_reads_config_alone(tmp_path, capsys):
    import json

    (tmp_path / "config.json").write_text(json.dumps(checkpoints.CONFIGS["deepseek_v3"]))
    assert check_only(tmp_path, Wish(keep=8)) == 0
    out = capsys.readouterr().out
    assert "feasible: 8 of 16 experts (deepseek_v3, top 3, 4 groups of which 2)" in out
    assert "every feasible number: 8, 12, 16" in out
    with pytest.raises(UserError, match="nearest feasible: 12 or 8"):
        check_only(tmp_path, Wish(keep=10))
    with pytest.raises(UserError, match="--routed-scaling-factor must be above 0: -1"):
        check_only(tmp_path, Wish(keep=8, routed_scaling_factor=-1))
    with pytest.raises(UserError, match="--target ascend must come with --ep"):
        check_only(tmp_path, Wish(keep=8, target="ascend"))


def test_check_only_answers_without_torch():
    code = "import sys, megatron_patch.pruning.wish; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _router(experts: int, bias: torch.Tensor | None = None):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = {**checkpoints.CONFIGS["deepseek_v3"], "n_routed_experts": experts}
    router = DeepseekV3TopkRouter(DeepseekV3Config(**config))
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(0))
        if bias is not None:
            router.e_score_correction_bias.copy_(bias)
    return router


def test_what_transformers_does_with_a_number_that_groups_do_not_divide():
    """Why the rule stands here: 10 experts in 4 groups fail with 3 tokens, and route wrongly without a word with 4."""
    assert broken_rules(Routing(10, 3, 4, 2, 2), 10)
    router = _router(10)
    with pytest.raises(RuntimeError):
        router(torch.randn(3, 32))
    _, _, chosen = router(torch.randn(4, 32, generator=torch.Generator().manual_seed(1)))
    assert chosen.shape == (4, 3)  # something, and no error


def test_what_transformers_does_with_too_few_experts_in_reach():
    """Groups of one: two groups of one reach two experts, top 3 takes a forbidden one."""
    with pytest.raises(RuntimeError):  # a group's score is of two experts
        _router(4)(torch.randn(4, 32))
    bias = torch.zeros(16)
    bias[torch.arange(16) % 4 != 0] = float("-inf")
    router = _router(16, bias)  # one survivor in each group
    _, _, chosen = router(torch.randn(5, 32))
    assert (chosen % 4 != 0).any(), "an expert at -inf was chosen"
    assert broken_rules(Routing(16, 3, 4, 2, 2), 4)
