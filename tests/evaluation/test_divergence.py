"""KL against its definition, one document at a time."""

from functools import partial

import pytest
import torch

from megatron_patch.evaluation import divergence
from megatron_patch.evaluation.ablations import BYPASSED, SCRAMBLED, bypassed, scrambled
from megatron_patch.evaluation.divergence import divergences
from megatron_patch.evaluation.encode import Example


@pytest.fixture(scope="module")
def documents():
    generator = torch.Generator().manual_seed(11)
    lengths = (2, 31, 17, 40, 9, 23, 40)
    return [Example(torch.randint(3, 320, (n,), generator=generator).tolist(), 1, "", "") for n in lengths]


def test_kl_equals_its_definition(export_model, documents):
    got = divergences(export_model, documents, {BYPASSED: partial(bypassed, export_model)}, batch_size=4)
    for document, kl in zip(documents, got[BYPASSED].tolist(), strict=True):
        ids = torch.tensor([document.ids])
        with torch.no_grad():
            p = export_model(ids, use_cache=False).logits.double().log_softmax(-1)[0, :-1]
            with bypassed(export_model):
                q = export_model(ids, use_cache=False).logits.double().log_softmax(-1)[0, :-1]
        assert kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)
    assert all(kl / len(document.ids) > 0.01 for kl, document in zip(got[BYPASSED].tolist(), documents, strict=True))


def test_layers_that_do_nothing_have_no_kl(zeroed_model, documents):
    ablations = {
        BYPASSED: partial(bypassed, zeroed_model),
        SCRAMBLED: partial(scrambled, zeroed_model, torch.Generator().manual_seed(0)),
    }
    got = divergences(zeroed_model, documents, ablations)
    assert not got[BYPASSED].any() and not got[SCRAMBLED].any()


def test_kl_does_not_depend_on_the_batches(export_model, documents, monkeypatch):
    ablations = {BYPASSED: partial(bypassed, export_model)}
    whole = divergences(export_model, documents, ablations, batch_size=len(documents))
    monkeypatch.setattr(divergence, "LOGITS_AT_ONCE", 1000)  # a position at a time
    single = divergences(export_model, documents, ablations, batch_size=1)
    torch.testing.assert_close(whole[BYPASSED], single[BYPASSED], rtol=1e-4, atol=1e-6)


def test_progress_counts_every_token_once(export_model, documents):
    done = []
    divergences(export_model, documents, {}, batch_size=2, progress=done.append)
    assert sum(done) == sum(len(document.ids) for document in documents)
