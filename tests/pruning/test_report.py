"""Figures and page of a report, and a plan that is not of its statistics."""

import json
import math

import pytest
import torch

from megatron_patch.errors import UserError
from megatron_patch.io.hashes import file_sha256
from megatron_patch.pruning import report
from megatron_patch.pruning.statistics import SourceStatistics, Statistics

COUNT = torch.tensor([[8, 4, 2, 2], [0, 16, 0, 0], [4, 4, 4, 4]])


def save(path, *, second: bool = False):
    sources = {"code": SourceStatistics.routed_only(16, COUNT)}
    if second:
        sources["maths"] = SourceStatistics.routed_only(16, COUNT.flip(1))
    Statistics("deepseek_v3", "ab" * 32, (3, 4, 5), 4, 1, sources).save(path)
    return path


def write_plan(path, stats, **changes):
    layers = {"3": {"kept": [0, 1]}, "4": {"kept": [1, 2]}, "5": {"kept": [2, 3]}}
    plan = {"schema": 1, "criterion": "frequency", "keep": 2, "stats_sha256": file_sha256(stats), "layers": layers}
    path.write_text(json.dumps({key: value for key, value in (plan | changes).items() if value is not ...}))
    return path


def test_curves():
    curve = report.coverage_curve(COUNT)
    assert curve.tolist() == [[0.5, 0.75, 0.875, 1.0], [1.0, 1.0, 1.0, 1.0], [0.25, 0.5, 0.75, 1.0]]
    assert report.kept_coverage(COUNT, (3, 4, 5), {3: [0, 1], 5: [0]}) == {3: 0.75, 5: 0.25}
    spread = report.effective_experts(COUNT)
    assert spread[1] == 1.0 and spread[2] == pytest.approx(4.0) and spread[0] == pytest.approx(math.exp(1.75 * math.log(2)))
    assert report.overlap_of_halves(COUNT[:1], COUNT[:1]) == 1.0
    assert report.overlap_of_halves(torch.tensor([[3, 2, 1, 0]]), torch.tensor([[3, 0, 2, 1]])) == pytest.approx(1 / 3)


def test_a_report_with_a_plan(tmp_path, capsys):
    stats = save(tmp_path / "s", second=True)
    assert report.run(stats, tmp_path / "out", write_plan(tmp_path / "plan.json", stats)) == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["coverage.png", "heatmap.png", "report.md"]
    for name in ("coverage.png", "heatmap.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| code | 16 | 3 of 12 | no (ids only) |" in page
    assert "keeps 2 by frequency" in page and "Overlap" in page
    assert "| 4 | 2 | 2.0 | 1 (50.0%) |" in page  # both sources: expert 1 and, mirrored, expert 2
    assert "written" in capsys.readouterr().out


def test_a_report_without_a_plan(tmp_path):
    report.run(save(tmp_path / "s"), tmp_path / "out")
    page = (tmp_path / "out" / "report.md").read_text()
    assert "kept" not in page.split("## How")[0] and "Overlap" not in page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stats_sha256": "0" * 64}, "must be of these statistics: .*sha256 0000000000000000"),
        ({"layers": ...}, "a plan is what `dsa-upcycle prune plan` wrote: .*KeyError 'layers'"),
        ({"layers": [1]}, "a plan is what"),
        ({"layers": {"3": {"kept": [4]}}}, "kept experts must be from 0 to 3: layer 3"),
    ],
)
def test_refuses_plans(changes, message, tmp_path):
    stats = save(tmp_path / "s")
    with pytest.raises(UserError, match=message):
        report.run(stats, tmp_path / "out", write_plan(tmp_path / "plan.json", stats, **changes))
    assert not (tmp_path / "out").exists()


def test_refuses_a_plan_that_is_no_json(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(UserError, match="a plan is what"):
        report.run(save(tmp_path / "s"), tmp_path / "out", tmp_path / "plan.json")
