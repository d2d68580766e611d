"""What a dump records of a DSA layer over MLA's latent is what it records elsewhere: else a device could not be compared."""

import contextlib

import torch

from megatron_patch.diagnosis.parity.trainer_side import _record_selection
from megatron_patch.model.architecture import DsaSettings
from megatron_patch.model.builder import forward_pack
from megatron_patch.ops import npu
from megatron_patch.ops.backends import BACKENDS, DsaBackend
from tests.model.build import tiny_model
from tests.ops.npu_contract import Contract


def test_selection_and_scores_of_the_absorbed_form_are_recorded(device, tiny_base, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch_npu", Contract(wide=True))
    absorbed = DsaBackend("npu", ("npu",), BACKENDS["chunked"].attention, npu.absorbed_attention)
    tokens, ends = torch.arange(40), torch.tensor([0, 14, 40], dtype=torch.int32)
    found = []
    for backend in (BACKENDS["chunked"], absorbed):
        model, _, _ = tiny_model(tiny_base, init="copy", backend=backend, dsa=DsaSettings(8, 32, 16))
        seen: dict[str, torch.Tensor] = {}
        with contextlib.ExitStack() as stack, torch.no_grad():
            for number in (3, 4):
                _record_selection(stack, model.decoder.layers[number].self_attention, f"layers.{number}.", seen.__setitem__)
            forward_pack(model.eval(), tokens, ends)
        found.append(seen)
    ours, theirs = found[1], found[0]
    assert ours.keys() == theirs.keys() == {f"layers.{n}.{what}" for n in (3, 4) for what in ("indexer", "indices")}
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0 if name.endswith("indices") else 1e-4)
