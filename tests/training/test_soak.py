"""The soak, short: a few random kills, and the result is the uninterrupted run's (`python -m tests.soak` for more)."""

import pytest

from tests.soak import FLAGS, LAYOUTS, soak


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "ep2"])
def test_a_few_random_kills(make_settings, text_prefix, tmp_path, layout):
    ranks, flags = LAYOUTS[layout]
    more = {"use_distributed_optimizer": True, "async_save": True} if ranks > 1 else {}
    settings = make_settings(tmp_path / "unused", text_prefix, **FLAGS, **flags, **more)
    tally = soak(settings, tmp_path, ranks=ranks, seed=4, kills=4)
    assert tally.kills.total() == 4 and tally.rounds >= 1
