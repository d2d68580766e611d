"""Documents stay apart in a packed micro-batch (positions without a mask let one document read another)."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_patch.data.batch import PackedBatch, Row, collate

EOS = 2


def make_row(ids: list[int]) -> Row:
    """`ids` is one token longer than the row, as GPTDataset gives it."""
    ids = torch.tensor(ids)
    return Row(ids[:-1], ids[1:], torch.ones(len(ids) - 1))


def test_documents_are_cut_after_eos_and_at_rows():
    rows = [make_row([1, 5, 2, 1, 6, 7]), make_row([8, 2, 1, 9, 2, 1])]
    batch = collate([(row, True) for row in rows], cut_after=EOS)
    assert batch.tokens.tolist() == [1, 5, 2, 1, 6, 8, 2, 1, 9, 2]
    assert batch.labels.tolist() == [5, 2, 1, 6, 7, 2, 1, 9, 2, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 7, 10]  # EOS at a row's end is one boundary, not two
    assert batch.loss_mask.tolist() == [1, 1, 0, 1, 1, 1, 0, 1, 1, 0]  # EOS is learned; what follows it is not
    assert batch.valid.all()
    assert (batch.tokens.dtype, batch.cu_seqlens.dtype) == (torch.int64, torch.int32)
    assert (batch.loss_mask.dtype, batch.valid.dtype) == (torch.float32, torch.bool)


def test_without_isolation_only_rows_are_documents():
    batch = collate([(make_row([1, 5, 2, 1, 6, 7]), True), (make_row([8, 2, 1]), True)], cut_after=None)
    assert batch.cu_seqlens.tolist() == [0, 5, 7]
    assert batch.loss_mask.tolist() == [1] * 7


def test_padding_is_a_document_of_its_own_that_counts_nowhere():
    batch = collate([(make_row([1, 5, 6]), True), (make_row([1, 7, 2, 9]), True)], pad_id=3, multiple_of=4)
    assert batch.tokens.tolist() == [1, 5, 1, 7, 2, 3, 3, 3]
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 8]
    assert batch.valid.tolist() == [True] * 5 + [False] * 3
    assert batch.loss_mask.tolist() == [1] * 5 + [0] * 3


def test_a_filler_row_counts_nowhere():
    batch = collate([(make_row([1, 5, 6]), True), (make_row([1, 7]), False)])
    assert batch.valid.tolist() == [True, True, False]
    assert batch.loss_mask.tolist() == [1, 1, 0]


rows_of_ids = st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=9), min_size=1, max_size=4)


@given(rows_of_ids, st.booleans(), st.integers(1, 5))
def test_every_token_is_in_exactly_one_document(ids, isolate, multiple_of):
    batch = collate([(make_row(row), True) for row in ids], cut_after=EOS if isolate else None, multiple_of=multiple_of)
    total = sum(len(row) - 1 for row in ids)
    cuts = batch.cu_seqlens.tolist()
    assert cuts[0] == 0 and cuts[-1] == len(batch.tokens) and len(batch.tokens) % multiple_of == 0
    assert all(a < b for a, b in pairwise(cuts))
    assert int(batch.valid.sum()) == total
    assert set(torch.tensor([len(row) - 1 for row in ids]).cumsum(0).tolist()) <= set(cuts)
    for first, last in pairwise(cuts):
        if isolate:
            assert EOS not in batch.tokens[first : last - 1].tolist() or first >= total
        # inside a document a counted label is the next token
        counted = batch.loss_mask[first : last - 1].bool()
        assert torch.equal(batch.labels[first : last - 1][counted], batch.tokens[first + 1 : last][counted])


def test_to_keeps_every_field():
    batch = collate([(make_row([1, 5, 6]), True)])
    moved = batch.to("cpu")
    assert isinstance(moved, PackedBatch)
    assert all(torch.equal(a, b) for a, b in zip(vars(moved).values(), vars(batch).values(), strict=True))
    assert batch.to("meta").tokens.device.type == "meta"
