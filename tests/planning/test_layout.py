"""Bytes per device: exact where a layout decides, an estimate that is measured where autograd decides."""

import json
from pathlib import Path

import pytest
import torch

from megatron_patch.config import ParallelSettings
from megatron_patch.errors import UserError
from megatron_patch.layout_rules import check_layout
from megatron_patch.model.architecture import Architecture, DsaSettings, read_architecture
from megatron_patch.model.layer_pattern import appended_pattern
from megatron_patch.planning import report
from megatron_patch.planning.layout import (
    CHUNK_BYTES,
    CHUNK_PAIR_BYTES,
    Bytes,
    Layout,
    PlanParallel,
    Work,
    bytes_per_device,
    kept_bytes,
    make_layout,
    stage_of,
    workspace_bytes,
)
from megatron_patch.planning.parameters import parts
from tests.planning.test_parameters import V2_LITE

WORK = Work(4096, 1, 2)
ALONE = Layout(1, 1, 1, 1, 1, 1, 1, False)


@pytest.fixture(scope="module")
def v2_lite() -> Architecture:
    return read_architecture(V2_LITE)


def plan(arch: Architecture, devices: int, work: Work = WORK, **flags) -> Bytes:
    pattern = appended_pattern(arch.num_layers, 2)
    layout = make_layout(PlanParallel(**flags), devices, arch, len(pattern))
    return bytes_per_device(parts(arch, pattern, DsaSettings()), arch, pattern, DsaSettings(), layout, work)


def test_one_device_holds_everything(v2_lite: Architecture) -> None:
    got = plan(v2_lite, 1)
    assert got.frozen == 2 * 15_706_484_224
    assert got.trainable == (2 + 4) * 1_212_429_824  # bf16 weights, fp32 gradients
    assert got.optimizer == (4 + 8) * 1_212_429_824  # fp32 copy and two moments
    assert 100e6 < got.logits < 200e6  # a chunk of logits: test_cost.py
    assert got.total == got.frozen + got.trainable + got.optimizer + got.activations + got.logits


def test_fp32_has_no_main_copy(v2_lite: Architecture) -> None:
    got = plan(v2_lite, 1, Work(4096, 1, 4))
    assert got.optimizer == 8 * 1_212_429_824
    assert got.frozen == 4 * 15_706_484_224


def test_expert_parallel_spreads_the_experts_alone(v2_lite: Architecture) -> None:
    """8 devices: an eighth of the routed experts, all the rest. The public figure for this layout is 9.3 GB static."""
    got = plan(v2_lite, 8, expert_model_parallel_size=8, use_distributed_optimizer=True)
    experts = 26 * 64 * 3 * 2048 * 1408
    assert got.frozen == 2 * (15_706_484_224 - experts + experts // 8)
    assert 9.0e9 < got.frozen + got.trainable + got.optimizer < 9.8e9


def test_distributed_optimizer_divides_states_by_the_devices_that_share_them(v2_lite: Architecture) -> None:
    whole = plan(v2_lite, 8, expert_model_parallel_size=4)
    spread = plan(v2_lite, 8, expert_model_parallel_size=4, use_distributed_optimizer=True)
    experts = 2 * 64 * 3 * 2048 * 1408 // 4
    others = 1_212_429_824 - 4 * experts
    assert whole.optimizer == 12 * (experts + others)
    # 4 x 2: an expert is on two devices, everything else on all eight
    assert spread.optimizer == pytest.approx(12 * (experts / 2 + others / 8), abs=1000)
    assert spread.trainable == whole.trainable


def test_tensor_parallel_keeps_latents_and_indexer_whole(v2_lite: Architecture) -> None:
    one = plan(v2_lite, 2)
    two = plan(v2_lite, 2, tensor_model_parallel_size=2, expert_tensor_parallel_size=2, sequence_parallel=True)
    assert one.frozen / 2 < two.frozen < one.frozen / 2 * 1.01
    assert two.logits == pytest.approx(one.logits, rel=0.01)  # half of the words, twice the tokens of a chunk


def test_the_fullest_stage_is_reported(v2_lite: Architecture) -> None:
    """Two stages: the last holds the DSA layers, and both hold frozen layers."""
    got = plan(v2_lite, 2, pipeline_model_parallel_size=2)
    assert got.trainable == 6 * 1_212_429_824
    assert 0.4 < got.frozen / (2 * 15_706_484_224) < 0.5


@pytest.mark.parametrize("layers, stages", [(29, 2), (29, 4), (5, 5), (4, 1)])
def test_every_layer_has_one_stage(layers: int, stages: int) -> None:
    got = [stage_of(layer, layers, stages) for layer in range(layers)]
    assert got == sorted(got) and set(got) == set(range(stages))
    assert max(map(got.count, set(got))) - min(map(got.count, set(got))) <= 1
    assert stage_of(-1, layers, stages) == 0 and stage_of(layers, layers, stages) == stages - 1


@pytest.mark.parametrize(
    "devices, flags, words",
    [
        (6, {"tensor_model_parallel_size": 4, "sequence_parallel": True}, ["6 % 4", "8 devices"]),
        (8, {"expert_model_parallel_size": 3}, ["expert", "8 % 3"]),
        (6, {"expert_model_parallel_size": 3}, ["must divide the experts", "64 % 3"]),
        (3, {"tensor_model_parallel_size": 3, "sequence_parallel": True, "expert_tensor_parallel_size": 3}, ["heads"]),
        (2, {"tensor_model_parallel_size": 2}, ["--sequence-parallel"]),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, ["--expert-tensor-parallel-size 2"]),
        (32, {"pipeline_model_parallel_size": 32}, ["32 > 29"]),
        (0, {}, ["--devices"]),
    ],
)
def test_layouts_that_cannot_be(v2_lite: Architecture, devices: int, flags: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        plan(v2_lite, devices, **flags)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_sizes_must_be_positive() -> None:
    with pytest.raises(UserError, match="--context-parallel-size must be positive: 0"):
        PlanParallel(context_parallel_size=0)


@pytest.mark.parametrize("stage", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimate_against_what_autograd_keeps(device, tmp_path: Path, dtype: torch.dtype, stage: str) -> None:
    """The formula, within a tenth of the bytes that a forward saves."""
    from megatron_patch.model.builder import forward_pack
    from tests.model.build import tiny_model
    from tests.tiny import make_tiny_base

    tokens, dsa = 256, DsaSettings(32, 4, 32)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "qk_nope_head_dim": 32}
    base = make_tiny_base(tmp_path, dtype=dtype, **sizes)
    model, state, _ = tiny_model(base, 2, dtype=dtype, init="copy", dsa=dsa)
    state.stage = stage
    arch = read_architecture(base)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (where := tensor.untyped_storage().data_ptr()) not in known:
            kept[where] = tensor  # alive, so that its address is not given out again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward_pack(model, torch.arange(tokens), torch.tensor([0, tokens], dtype=torch.int32), torch.arange(tokens))
    logits = tokens * arch.vocab_size * 4  # kept for the loss; counted elsewhere
    measured = sum(t.untyped_storage().nbytes() for t in kept.values()) - logits
    work = Work(tokens, 1, torch.finfo(dtype).bits // 8)
    estimate = 2 * kept_bytes(arch, dsa, ALONE, work)
    assert estimate == pytest.approx(measured, rel=0.1)


def test_workspace_is_the_chunked_ops(v2_lite: Architecture) -> None:
    """Its own constants and choice of rows; a layout that splits the heads splits their part."""
    from megatron_patch.ops import chunked

    assert (CHUNK_BYTES, CHUNK_PAIR_BYTES) == (chunked.CHUNK_BYTES, chunked.PAIR_BYTES)
    heads, numbers = 16, 16 * (2 * 192 + 128)
    for tokens in (16, 4096):
        rows = chunked.chunk_rows(tokens, heads, DsaSettings().index_n_heads)
        row = tokens * (4 * (DsaSettings().index_n_heads + 2 * heads) + CHUNK_PAIR_BYTES)
        got = workspace_bytes(v2_lite, DsaSettings(), ALONE, Work(tokens, 1, 2)) - 4 * numbers * tokens
        assert rows * row <= got < (rows + 1) * row
    assert rows < 4096  # a chunk is a part there


def read_plan(tmp_path: Path, **kwargs) -> dict:
    file = tmp_path / "layout.json"
    assert report.run(V2_LITE, json_file=file, **kwargs) == 0
    return json.loads(file.read_text())


def test_layout_json_is_the_documented_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = PlanParallel(expert_model_parallel_size=8, use_distributed_optimizer=True)
    got = read_plan(tmp_path, devices=8, device_memory_gb=64, parallel=flags)
    assert got["schema"] == 1
    assert got["parameters"].keys() >= {"base", "trainable", "total"}
    assert got["layout"] == {"tp": 1, "pp": 1, "ep": 8, "etp": 1, "cp": 1, "dp": 8}
    used = got["bytes_per_device"]
    assert list(used) == ["frozen", "trainable", "optimizer", "activations", "logits", "total"]
    assert used["total"] == sum(value for key, value in used.items() if key != "total")
    assert got["fits"] is True
    out = capsys.readouterr().out
    assert "15,706,484,224" in out and "fits a device of 64 GB" in out


def test_fit_is_decided_by_the_total(tmp_path: Path) -> None:
    total = read_plan(tmp_path)["bytes_per_device"]["total"] / 1e9
    assert read_plan(tmp_path)["fits"] is None
    assert read_plan(tmp_path, device_memory_gb=total * 0.999)["fits"] is False
    crowded = read_plan(tmp_path, device_memory_gb=total * 1.001)
    assert crowded["fits"] is True and [w["code"] for w in crowded["warnings"]] == ["crowded"]


def test_a_layout_that_training_refuses_is_marked(tmp_path: Path) -> None:
    flags = PlanParallel(pipeline_model_parallel_size=2)
    with pytest.raises(UserError):
        check_layout(ParallelSettings(pipeline_model_parallel_size=2).launch())
    codes = [w["code"] for w in read_plan(tmp_path, devices=2, parallel=flags)["warnings"]]
    assert codes == ["not_in_this_release", "uneven_stages", "frozen_stages"]
    spread = read_plan(tmp_path, devices=8, parallel=PlanParallel(expert_model_parallel_size=8))
    assert "not_in_this_release" not in [w["code"] for w in spread["warnings"]], "experts over ranks do train"
