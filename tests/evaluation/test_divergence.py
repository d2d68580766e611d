"""Scores against independent computations: real greedy decoding, and the loss of one document at a time."""

from functools import partial

import pytest
import torch

from megatron_patch.errors import UserError
from megatron_patch.evaluation import scores
from megatron_patch.evaluation.ablations import BYPASSED, SCRAMBLED, WITH, bypassed, scrambled
from megatron_patch.evaluation.encode import Example
from megatron_patch.evaluation.scores import document_scores, exact_matches


@pytest.fixture(scope="module")
def documents():
    generator = torch.Generator().manual_seed(11)
    return [Example(torch.randint(3, 320, (n,), generator=generator).tolist(), 1) for n in (2, 31, 17, 40, 9, 23, 40)]


@pytest.mark.parametrize("name", ["base_model", "export_model"])
def test_exact_match_is_what_greedy_decoding_writes(request, name):
    model = request.getfixturevalue(name)
    model.generation_config.eos_token_id = None  # the comparison is by tokens: nothing may stop it early
    generator, examples, expected = torch.Generator().manual_seed(7), [], []
    for number in range(12):
        prompt = torch.randint(3, 320, (1, 5 + 2 * number), generator=generator)
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
        written = ids[0].tolist()
        if wrong := number % 3:  # spoil the last token of every third row, the first answer token of every other third
            place = -1 if wrong == 1 else prompt.shape[1]
            written[place] = (written[place] + 1) % 320
        examples.append(Example(written, prompt.shape[1]))
        expected.append(float(not wrong))
    got = exact_matches(model, examples, batch_size=5)
    assert got[WITH].tolist() == expected


@pytest.mark.parametrize("name", ["base_model", "export_model"])
def test_loss_equals_one_document_at_a_time(request, name, documents):
    model = request.getfixturevalue(name)
    got = document_scores(model, documents, batch_size=3)
    for document, nll in zip(documents, got.nll[WITH].tolist(), strict=True):
        ids = torch.tensor([document.ids])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits.double()
        expected = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
        assert nll == pytest.approx(float(expected), rel=1e-5)  # fp32 sums in another order
    assert got.tokens.tolist() == [len(document.ids) - 1 for document in documents]
    assert got.kl == {}


def test_kl_equals_its_definition(export_model, documents):
    ablations = {BYPASSED: partial(bypassed, export_model)}
    got = document_scores(export_model, documents, ablations, batch_size=4)
    for document, kl in zip(documents, got.kl[BYPASSED].tolist(), strict=True):
        ids = torch.tensor([document.ids])
        with torch.no_grad():
            p = export_model(ids, use_cache=False).logits.double().log_softmax(-1)[0, :-1]
            with bypassed(export_model):
                q = export_model(ids, use_cache=False).logits.double().log_softmax(-1)[0, :-1]
        assert kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)
    assert (got.kl[BYPASSED] / got.tokens).min() > 0.01


def test_layers_that_do_nothing_have_no_kl(base_model, zeroed_model, documents):
    ablations = {
        BYPASSED: partial(bypassed, zeroed_model),
        SCRAMBLED: partial(scrambled, zeroed_model, torch.Generator().manual_seed(0)),
    }
    got = document_scores(zeroed_model, documents, ablations)
    assert not got.kl[BYPASSED].any() and not got.kl[SCRAMBLED].any()
    assert torch.equal(got.nll[WITH], got.nll[BYPASSED])
    assert torch.equal(got.nll[WITH], document_scores(base_model, documents).nll[WITH])


def test_scores_do_not_depend_on_the_batches(export_model, documents, monkeypatch):
    whole = document_scores(export_model, documents, batch_size=len(documents))
    monkeypatch.setattr(scores, "LOGITS_AT_ONCE", 1000)  # three positions at a time
    single = document_scores(export_model, documents, batch_size=1)
    torch.testing.assert_close(whole.nll[WITH], single.nll[WITH], rtol=1e-5, atol=0)


def test_progress_counts_every_token_once(base_model, documents):
    done = []
    document_scores(base_model, documents, batch_size=2, progress=done.append)
    exact_matches(base_model, documents, batch_size=3, progress=done.append)
    assert sum(done) == 2 * sum(len(document.ids) for document in documents)


@pytest.mark.parametrize("score", [exact_matches, document_scores])
def test_refuses_logits_that_are_not_finite(base_model, documents, score):
    """arg-max over NaN would score as a wrong answer, in silence."""
    weight = base_model.model.norm.weight
    before = weight.data.clone()
    try:
        weight.data[0] = float("nan")
        with pytest.raises(UserError, match="logits must be finite: the model gives"):
            score(base_model, documents)
    finally:
        weight.data.copy_(before)
