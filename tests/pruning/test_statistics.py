"""Statistics add up, survive a file, and are refused where they cannot be true."""

import hashlib
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.errors import UserError
from megatron_patch.pruning.statistics import GATE_FIELDS, SourceStatistics, Statistics, model_sha256
from tests.tiny import make_tiny_base

LAYERS, EXPERTS, TOP_K = (1, 2), 4, 2


def source(tokens: int, seed: int = 0) -> SourceStatistics:
    g = torch.Generator().manual_seed(seed)
    index = torch.rand(2, tokens, EXPERTS, generator=g).topk(TOP_K).indices.flatten(1)
    count = torch.stack([torch.bincount(row, minlength=EXPERTS) for row in index])
    return SourceStatistics(tokens, count, *(torch.rand(2, EXPERTS, generator=g, dtype=torch.float64) for _ in GATE_FIELDS))


def of(**sources: SourceStatistics) -> Statistics:
    return Statistics("deepseek_v2", "ab" * 32, LAYERS, EXPERTS, TOP_K, sources)


def same(a: SourceStatistics, b: SourceStatistics) -> bool:
    return a.tokens == b.tokens and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("count", *GATE_FIELDS)
    )


def test_a_file_gives_back_what_was_saved(tmp_path):
    saved = of(code=source(5, 1), maths=source(9, 2))
    saved.save(tmp_path / "s.safetensors")
    got = Statistics.load(tmp_path / "s.safetensors")
    assert (got.model_type, got.model_sha256, got.layers, got.num_experts, got.top_k) == (
        "deepseek_v2", "ab" * 32, LAYERS, EXPERTS, TOP_K,
    )  # fmt: skip
    assert list(got.sources) == ["code", "maths"]
    assert all(same(got.sources[name], saved.sources[name]) for name in got.sources)
    assert list(tmp_path.iterdir()) == [tmp_path / "s.safetensors"]


def test_merging_adds_sources_of_one_name_and_keeps_the_others():
    a, b, c = source(5, 1), source(9, 2), source(4, 3)
    got = of(x=a).merge(of(x=b, y=c))
    assert got.sources["x"].tokens == 14 and torch.equal(got.sources["x"].count, a.count + b.count)
    assert torch.equal(got.sources["x"].gate_norm_max, torch.maximum(a.gate_norm_max, b.gate_norm_max))
    assert same(got.sources["y"], c)
    assert same(got.combined(), a + b + c)


def test_source_weights():
    a, b = source(5, 1), source(9, 2)
    got = of(x=a, y=b).combined({"x": 2.5})
    torch.testing.assert_close(got.count, 2.5 * a.count + b.count.double())
    torch.testing.assert_close(got.gate_norm_sum, 2.5 * a.gate_norm_sum + b.gate_norm_sum)
    torch.testing.assert_close(got.gate_norm_max, torch.maximum(a.gate_norm_max, b.gate_norm_max))
    assert torch.equal(of(x=a, y=b).combined({"x": 0}).gate_norm_max, b.gate_norm_max)


def test_ids_alone_have_no_weights_and_say_so(tmp_path):
    ids = SourceStatistics.routed_only(5, source(5).count)
    of(x=ids).save(tmp_path / "s.safetensors")
    got = Statistics.load(tmp_path / "s.safetensors").sources["x"]
    assert not got.has_gates and source(5).has_gates
    assert not (got + source(5)).has_gates and math.isnan(float((got + source(5)).gate_norm_max[0, 0]))
    assert of(x=ids, y=source(3)).combined({"x": 0}).has_gates


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"mahts": 1.0}, "unknown source mahts; did you mean maths; the statistics have code, maths"),
        ({"code": -1.0}, "must be 0 or more: code has -1.0"),
        ({"code": math.nan}, "code has nan"),
        ({"code": 0.0, "maths": 0.0}, "all of code, maths have weight 0"),
    ],
)
def test_refuses_source_weights(weights, message):
    with pytest.raises(UserError, match=message):
        of(code=source(5), maths=source(4)).combined(weights)


def test_refuses_to_merge_those_of_another_model():
    other = Statistics("deepseek_v2", "cd" * 32, LAYERS, EXPERTS, TOP_K, {"x": source(3)})
    with pytest.raises(UserError, match="of one model can be merged: model_sha256 differs"):
        of(x=source(3)).merge(other)


@pytest.mark.parametrize("name", ["", "a/b", " a", "a\nb"])
def test_refuses_a_source_name(name, tmp_path):
    with pytest.raises(UserError, match="a source's name must be printable"):
        of(**{name: source(3)}).save(tmp_path / "s.safetensors")


def _shorter(tensors):
    tensors["x/count"] = tensors["x/count"][:1].clone()


def _floats(tensors):
    tensors["x/gate_sum"] = tensors["x/gate_sum"].float()


def _lost(tensors):
    del tensors["x/gate_norm_max"]


def _more(tensors):
    tensors["x/other"] = torch.zeros(1)


def _one_too_many(tensors):
    tensors["x/count"][0, 0] += 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_shorter, r"x/count is torch.int64 \(1, 4\), not torch.int64 \(2, 4\)"),
        (_floats, "x/gate_sum is torch.float32"),
        (_lost, "it lacks 'x/gate_norm_max'"),
        (_more, "its tensors are not those of its sources"),
        (_one_too_many, r"in x a layer's counts do not add up to 5 tokens \* top 2"),
    ],
)
def test_refuses_numbers_that_cannot_be(change, message, tmp_path):
    from safetensors import safe_open

    path = tmp_path / "s.safetensors"
    of(x=source(5)).save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)
    with pytest.raises(UserError, match=message):
        Statistics.load(path)


def test_refuses_other_files(tmp_path):
    path = tmp_path / "s.safetensors"
    with pytest.raises(UserError, match="a statistics file must exist"):
        Statistics.load(path)
    for content in (b"", b"garbage", b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(UserError, match="a statistics file is what"):
            Statistics.load(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(UserError, match=r"it lacks 'dsa_upcycle.statistics'"):
        Statistics.load(path)
    of(x=source(5)).save(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="a statistics file is what"):
        Statistics.load(path)


def test_refuses_those_of_an_unfinished_run(tmp_path):
    of(x=source(5)).save(tmp_path / "s", progress={"batches": {"x": 1}})
    with pytest.raises(UserError, match="of a run that did not finish; run its command again with --resume"):
        Statistics.load(tmp_path / "s")


def test_identity_of_a_model(tmp_path):
    sharded, single = make_tiny_base(tmp_path / "a"), make_tiny_base(tmp_path / "b", shards=1)
    index = (sharded / "model.safetensors.index.json").read_bytes()
    assert model_sha256(sharded) == hashlib.sha256(index).hexdigest()
    content = (single / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    assert model_sha256(single) == hashlib.sha256(content[8 : 8 + size]).hexdigest()
    (single / "model.safetensors").write_bytes(content[:4])
    with pytest.raises(UserError, match="has no header"):
        model_sha256(single)
    with pytest.raises(UserError, match="has neither"):
        model_sha256(tmp_path)
