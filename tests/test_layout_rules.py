"""Every rule of the layout: a launch that breaks it alone is refused with rule, values and remedy; none is without a case."""

import pytest

from megatron_patch.errors import UserError
from megatron_patch.layout_rules import RULES, Launch, check_layout

GOOD = [
    Launch(),
    Launch(expert=8, ranks=16, experts=64, distributed_optimizer=True),
    Launch(expert=2, ranks=2, experts=64, optimizer="sgd"),
    Launch(optimizer="muon", ranks=8),
    Launch(train="base-indexers", ranks=3),
]
BROKEN = [  # in the table's order
    (Launch(tensor=2), "--tensor-model-parallel-size must be 1: no other layout is proven equal in this release: 2; use"),
    (Launch(pipeline=2), "--pipeline-model-parallel-size must be 1"),
    (Launch(expert_tensor=2), "--expert-tensor-parallel-size must be 1"),
    (Launch(context=2), "--context-parallel-size must be 1"),
    (Launch(sequence=True), "--sequence-parallel needs tensor parallelism: on; leave it out"),
    (Launch(expert=0), "--expert-model-parallel-size must be positive: 0; 1 keeps"),
    (Launch(expert=4, ranks=6), "ranks must be a multiple of --expert-model-parallel-size: 6 ranks, 4; start as many"),
    (Launch(expert=3, experts=64), "must divide the base's experts: 64 experts, 3; use a divisor"),
    (Launch(expert=2, optimizer="muon"), "muon needs all experts on every rank: --expert-model-parallel-size 2; use adam"),
    (Launch(optimizer="muon", distributed_optimizer=True), "muon needs whole matrices: --use-distributed-optimizer; leave"),
    (Launch(expert=2, train="base-indexers"), "--train base-indexers needs --expert-model-parallel-size 1"),
    (Launch(timeout_minutes=0), "--distributed-timeout-minutes must be positive: 0; 30 is usual"),
]


@pytest.mark.parametrize("launch", GOOD)
def test_allowed(launch):
    check_layout(launch)


@pytest.mark.parametrize("number", range(len(RULES)))
def test_each_rule_refuses_its_case_and_no_other(number):
    launch, message = BROKEN[number]
    with pytest.raises(UserError) as caught:
        check_layout(launch)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    broken = [i for i, rule in enumerate(RULES) if i != 5 and launch.expert > 0 and not rule.holds(launch)]
    assert broken == ([number] if launch.expert > 0 else [])


def test_every_rule_has_a_case():
    assert len(BROKEN) == len(RULES)
