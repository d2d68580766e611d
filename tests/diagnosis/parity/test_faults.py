"""Every known fault, planted on one side, is named first; a clean pair raises no alarm."""

from dataclasses import replace

import pytest
import torch

from megatron_patch.diagnosis.parity.pages import markdown, write_figure
from megatron_patch.diagnosis.parity.parity import examine
from megatron_patch.diagnosis.parity.planted import PLANTS, planted
from megatron_patch.faults import FAULTS, Fault
from megatron_patch.io.publish import atomic_write_json
from tests.diagnosis.parity.sides import checkpoint_dump, model_of, trainer_dump, trainer_of

# A sigmoid router's; tests/diagnosis/parity/test_sigmoid.py has it.
NOT_OF_SOFTMAX = {Fault.ROUTER_BIAS_MISSING}
# In bf16 the planted k_norm epsilon, a few millionths, is far below one rounding of its inputs.
BELOW_BF16 = {Fault.K_NORM_EPS}


@pytest.fixture(scope="module")
def clean_trainer(journey):
    return {n: trainer_dump(journey, documents=n) for n in (1, 3)}


def named(report) -> list[str]:
    return [each["fault"] for each in report["suspected"]]


def test_every_fault_is_described_and_every_model_fault_can_be_planted():
    assert set(FAULTS) == set(Fault)
    assert set(Fault) - set(PLANTS) == {Fault.STALE_TOPK_RECOMPUTE, Fault.ATTENTION_LEAKS_DOCUMENTS}


@pytest.mark.parametrize("documents", [1, 3])
def test_a_clean_pair_passes(journey, clean_trainer, documents):
    report = examine(
        clean_trainer[documents], checkpoint_dump(journey, documents=documents), journey.export, progress=False
    ).report
    assert report["verdict"] == "pass", report["reasons"]
    assert report["suspected"] == [] and report["first_divergence"] is None
    assert report["index"]["tested"] and report["index"]["future"] == report["index"]["cross_doc"] == 0
    test = report["self_test"]["trainer"]
    assert test["recompute_indices_equal"] and test["recomputed_layers"] == 2
    assert all(row["non_finite"] == 0 for row in report["modules"]) and report["router"]["left_out"] == 0
    assert report["weights"]["frozen_bit_equal"] and not report["weights"]["differing"]
    if journey.dtype == "float32":
        assert report["logprobs"]["max"] < 1e-5 and report["router"]["agreement"] == 1


@pytest.mark.parametrize("fault", sorted(set(PLANTS) - NOT_OF_SOFTMAX))
def test_a_fault_of_the_checkpoint_is_named_first(journey, clean_trainer, fault):
    if journey.dtype == "bfloat16" and fault in BELOW_BF16:
        pytest.skip("the fault is smaller than one rounding")
    model = model_of(journey)
    with planted(model, fault):
        dump = checkpoint_dump(journey, model)
    report = examine(clean_trainer[3], dump, journey.export, progress=False).report
    assert report["verdict"] == "fail"
    assert named(report)[0] == fault
    assert report["suspected"][0]["side"] == report["first_divergence"]["side"] == "checkpoint"
    assert report["first_divergence"]["module"] in (FAULTS[fault].module, "indexer", "attention")


def test_planting_is_undone(journey, clean_trainer):
    model = model_of(journey)
    before = checkpoint_dump(journey, model)
    for fault in sorted(set(PLANTS) - NOT_OF_SOFTMAX):
        with planted(model, fault):
            pass
    after = checkpoint_dump(journey, model)
    assert all(torch.equal(value, after.tensors[name]) for name, value in before.tensors.items())


def test_a_model_that_cannot_have_a_fault_is_refused(fp32):
    with pytest.raises(ValueError, match="no part of"), planted(model_of(fp32), Fault.ROUTER_BIAS_MISSING):
        pass


class TestTrainer:
    """Faults of the trainer: planted by its own switches, not by `planted`."""

    @pytest.fixture(scope="class")
    def checkpoint(self, fp32):
        return checkpoint_dump(fp32)

    def report(self, fp32, trainer, checkpoint):
        return examine(trainer_dump(fp32, trainer), checkpoint, fp32.export, progress=False).report

    def check(self, report, fault, module):
        assert report["verdict"] == "fail" and named(report)[0] == fault
        assert report["suspected"][0]["side"] == "trainer"
        if module:
            assert report["first_divergence"]["module"] == module and report["first_divergence"]["side"] == "trainer"

    def test_mscale(self, fp32, checkpoint, monkeypatch):
        from megatron_patch.diagnosis.parity import trainer_side

        build = trainer_side.build_model
        monkeypatch.setattr(trainer_side, "build_model", lambda *args: build(*args, mscale_all_dim=0.0))
        self.check(self.report(fp32, trainer_of(fp32), checkpoint), Fault.MSCALE_ALL_DIM_0, "attention")

    def test_leak_between_documents(self, fp32, checkpoint, monkeypatch):
        from megatron_patch.model import core_attention

        attention = core_attention.causal_attention
        monkeypatch.setattr(
            core_attention,
            "causal_attention",
            lambda q, k, v, cu_seqlens, scale: attention(q, k, v, torch.tensor([0, len(q)]), scale),
        )
        self.check(self.report(fp32, trainer_of(fp32), checkpoint), Fault.ATTENTION_LEAKS_DOCUMENTS, "attention")

    def test_leak_in_the_selection(self, fp32, checkpoint):
        trainer = trainer_of(fp32)
        dump = trainer_dump(fp32, trainer)
        dump.tensors["layers.4.indices"][-1, 0] = 0  # the last document's last token takes the first document's first
        report = examine(dump, checkpoint, fp32.export, progress=False).report
        assert report["index"]["cross_doc"] == 1
        assert named(report)[0] == Fault.ATTENTION_LEAKS_DOCUMENTS and report["suspected"][0]["side"] == "trainer"
        other = examine(checkpoint, dump, fp32.export, progress=False).report  # whichever side comes first
        assert other["suspected"][0]["side"] == "trainer"

    def test_stale_selection_in_recomputation(self, fp32, checkpoint):
        """The recomputed pass is given what the first one selected; here it attends to another row's keys all the same."""
        trainer = trainer_of(fp32)
        attention = trainer.model.decoder.layers[3].self_attention
        op, second_passes = attention.backend.attention, []

        def stale(*args, indices=None, **options):
            result = op(*args, indices=indices, **options)
            if indices is None:
                return result
            second_passes.append(indices)
            return result._replace(indices=result.indices.roll(1, 0))

        attention.backend = replace(attention.backend, attention=stale)
        report = self.report(fp32, trainer, checkpoint)
        assert len(second_passes) == 1
        self.check(report, Fault.STALE_TOPK_RECOMPUTE, None)

    def test_bf16_router(self, fp32, checkpoint):
        trainer = trainer_of(fp32)
        for layer in trainer.model.decoder.layers:
            if hasattr(layer.mlp, "router"):
                gating = layer.mlp.router.gating
                layer.mlp.router.gating = lambda x, gating=gating: gating(x).bfloat16().float()
        self.check(self.report(fp32, trainer, checkpoint), Fault.ROUTER_BF16, "router")

    @pytest.mark.parametrize(
        ("name", "fault"), [("k_norm.bias", Fault.K_NORM_NO_BIAS), ("shared_experts.linear_fc2.weight", Fault.SHARED_EXPERT_SCALED)]
    )
    def test_wrong_weights_in_memory(self, fp32, checkpoint, name, fault):
        trainer = trainer_of(fp32)
        with torch.no_grad():
            for key, parameter in trainer.model.named_parameters():
                if key.endswith(name) and "layers.4" in key:
                    parameter.mul_(0 if "bias" in name else 1.01)
        report = self.report(fp32, trainer, checkpoint)
        self.check(report, fault, FAULTS[fault].module)
        assert report["first_divergence"]["layer"] == 4 and len(report["weights"]["differing"]) == 1

    def test_swapped_experts_in_memory(self, fp32, checkpoint):
        trainer = trainer_of(fp32)
        experts = trainer.model.decoder.layers[2].mlp.experts.local_experts
        with torch.no_grad():
            for a, b in zip(experts[1].parameters(), experts[5].parameters(), strict=True):
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
        report = self.report(fp32, trainer, checkpoint)
        self.check(report, Fault.EXPERTS_SWAPPED, "experts")
        assert "experts 1 and 5" in report["suspected"][0]["evidence"]
        assert not report["weights"]["frozen_bit_equal"]

    def test_a_wrong_embedding_is_found(self, fp32, checkpoint):
        trainer = trainer_of(fp32)
        with torch.no_grad():
            trainer.model.embedding.word_embeddings.weight[checkpoint.tokens[5]] *= 1.001
        report = self.report(fp32, trainer, checkpoint)
        assert report["first_divergence"]["module"] == "input" and report["first_divergence"]["layer"] == 0

    @pytest.mark.parametrize("weights", [True, False])
    def test_a_side_that_gives_nan_gets_its_report(self, fp32, checkpoint, weights, tmp_path):
        """Counted, never passed over, with and without a judge; null where JSON has no number."""
        trainer = trainer_of(fp32)
        with torch.no_grad():
            trainer.model.decoder.layers[2].mlp.shared_experts.linear_fc2.weight[0, 0] = torch.nan
        report = examine(trainer_dump(fp32, trainer), checkpoint, fp32.export if weights else None, progress=False).report
        assert report["verdict"] == "fail" and report["logprobs"]["mean"] is None
        assert any("values are not finite, the first in layer 2 shared" in reason for reason in report["reasons"])
        assert next(row for row in report["modules"] if row["non_finite"])["non_finite"] == 96
        if weights:
            assert report["first_divergence"] == report["first_divergence"] | {"layer": 2, "module": "shared", "rel": None}
        atomic_write_json(tmp_path / "parity.json", report)
        write_figure(report, tmp_path / "parity.png")
        assert "not finite" in markdown(report)

    def test_the_second_sides_self_test_counts(self, fp32, checkpoint):
        a, b = trainer_dump(fp32), trainer_dump(fp32)
        a.side, b.side = "trainer A", "trainer B"
        assert examine(a, b, fp32.export, progress=False).report["verdict"] == "pass"
        b.self_test["indices_equal"] = False
        report = examine(a, b, fp32.export, progress=False).report
        assert report["verdict"] == "fail" and "trainer B" in report["reasons"][0]

    def test_a_gain_below_the_limit_of_single_errors_says_so(self, fp32, checkpoint):
        trainer = trainer_of(fp32)
        with torch.no_grad():
            trainer.model.decoder.layers[2].mlp.shared_experts.linear_fc2.weight *= 1 + 4e-7
        first = self.report(fp32, trainer, checkpoint)["first_divergence"]
        assert first["module"] == "shared" and first["rel"] <= first["limit"] and "gain" in first["text"]

    def test_right_modules_with_other_results_do_not_pass(self, fp32, checkpoint):
        """What nothing else sees: log-probs far apart, although every module that was recorded is right."""
        other = replace(checkpoint, tensors=dict(checkpoint.tensors))
        other.side, other.tensors["log_probs"] = "other", checkpoint.tensors["log_probs"] - 0.5
        for name in [n for n in other.tensors if n.startswith("layers.4.output")]:
            del other.tensors[name]  # else the log-probs themselves are judged
        report = examine(checkpoint, other, fp32.export, progress=False).report
        assert report["verdict"] == "fail" and "0.500 nats" in report["reasons"][0]

    def test_an_unknown_fault_stays_unnamed(self, fp32, checkpoint):
        trainer = trainer_of(fp32)
        with torch.no_grad():
            trainer.model.decoder.layers[1].self_attention.linear_proj.weight[0] += 0.1
        report = self.report(fp32, trainer, checkpoint)
        assert report["verdict"] == "fail" and report["suspected"] == []
        assert report["first_divergence"]["layer"] == 1 and report["first_divergence"]["module"] == "attention"
