"""The soak, short: a few random kills, and the result is the uninterrupted run's (`python -m tests.soak` for more)."""

import pytest

from tests.soak import FLAGS, soak


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_few_random_kills(make_settings, text_prefix, tmp_path, ranks):
    spread = {"expert_model_parallel_size": 2, "use_distributed_optimizer": True} if ranks > 1 else {}
    settings = make_settings(tmp_path / "unused", text_prefix, **FLAGS, **spread)
    tally = soak(settings, tmp_path, ranks=ranks, seed=4, kills=4)
    assert tally.kills.total() == 4 and tally.rounds >= 1
