"""metrics.jsonl when a run goes on."""

import json

import pytest

from megatron_patch.config import OutputSettings
from megatron_patch.errors import UserError
from megatron_patch.training.metrics import METRICS, MetricsWriter, read_metrics


def rows(*iterations: int) -> str:
    return "".join(json.dumps({"kind": "train", "iteration": i}) + "\n" for i in iterations)


@pytest.mark.parametrize("tail", ['{"kind": "tra', "\0\0\0", "null", '{"kind": "train"}'])
def test_a_half_written_last_line_does_not_stop_a_resume(tmp_path, capsys, tail):
    """What a failing machine leaves: a part of a line, or a block of zeros."""
    (tmp_path / METRICS).write_text(rows(1, 2, 3) + tail)
    MetricsWriter(OutputSettings(save=tmp_path), {}, resume_at=2).close()
    assert (tmp_path / METRICS).read_text() == rows(1, 2)
    assert f"{METRICS}:4 is not whole and is left out" in capsys.readouterr().err


def test_a_damaged_line_within_is_the_users_to_mend(tmp_path):
    (tmp_path / METRICS).write_text(rows(1) + "x\n" + rows(2))
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: no row of metrics \(.*; remove the line"):
        read_metrics(tmp_path)
    assert read_metrics(tmp_path / "absent") == []
