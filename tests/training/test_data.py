"""The data of a run as it starts: the line that says how they are packed is measured, not believed."""

import re

import torch

from megatron_patch.config import PRETRAIN, SFT
from megatron_patch.data.batch import Row, collate
from megatron_patch.data.sft_dataset import SftDataset
from megatron_patch.training.data import build_data, describe_packing


def opened(make_settings, tmp_path, data, kind, capsys, **flags) -> tuple[list, str]:
    settings = make_settings(tmp_path / "run", data, **({"seq_length": 128} | flags))
    built = build_data(settings, kind, vocab_size=320, consumed_samples=0)
    lines = [line for line in capsys.readouterr().out.splitlines() if "laid end to end" in line]
    assert len(lines) == 1
    return [next(built.train) for _ in range(16)], lines[0]


def test_chats_say_their_lengths_and_documents(device, make_settings, sft_folder, tmp_path, capsys):
    batches, line = opened(make_settings, tmp_path, sft_folder, SFT, capsys, split="100,0")
    lengths = SftDataset(sft_folder, seq_length=128).lengths
    tokens = sum(len(batch.tokens) for batch in batches) / 16
    assert line == (
        f"sft: 60 samples of {lengths.min()} to {lengths.max()} tokens (mean {lengths.mean():.0f}), laid end to end: "
        f"2.0 documents and {tokens:.0f} tokens a micro-batch, no padding"
    )


def test_the_held_out_share_is_not_counted(device, make_settings, sft_folder, tmp_path, capsys):
    assert "sft: 48 samples" in opened(make_settings, tmp_path, sft_folder, SFT, capsys)[1]


def test_text_says_how_many_documents_a_micro_batch_joins(device, make_settings, text_prefix, tmp_path, capsys):
    batches, line = opened(make_settings, tmp_path, text_prefix, PRETRAIN, capsys)
    documents = sum(len(batch.cu_seqlens) - 1 for batch in batches) / 16
    assert documents > 2
    rest = f"laid end to end: {documents:.1f} documents and 256 tokens a micro-batch, no padding"
    assert re.fullmatch(r"pretrain: \d+ rows of 128 tokens, " + re.escape(rest), line), line
    one_document_a_row = opened(make_settings, tmp_path, text_prefix, PRETRAIN, capsys, isolate_documents=False)[1]
    assert "2.0 documents and 256 tokens" in one_document_a_row


def test_padding_is_shown_where_there_is_some():
    row = Row(torch.arange(6), torch.arange(6), torch.ones(6))
    line = describe_packing(PRETRAIN, [row], [collate([(row, True)], multiple_of=8)])
    assert line.endswith("1.0 documents and 8 tokens a micro-batch, 25.0% of them padding")
