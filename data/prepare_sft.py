"""Chat files -> samples with loss masks for supervised fine-tuning.

    python data/prepare_sft.py --input chats.jsonl --tokenizer BASE --seq-length 4096 --output runs/chats

Rows are OpenAI's `messages`, ShareGPT's `conversations` or Alpaca's `instruction`/`input`/`output`. The tokenizer's own
chat template is used; learned are the assistant's tokens and the token that ends its turn. Writes
runs/chats/samples.parquet and meta.json (counts, dropped rows by reason, hashes).
"""

import sys

from megatron_patch.data.sft_corpus import SftCorpusSettings, prepare_sft
from megatron_patch.errors import run, unwind_on_sigterm
from megatron_patch.flags import parse


def main() -> None:
    prepare_sft(parse(SftCorpusSettings, sys.argv[1:], "prepare_sft.py", __doc__))


if __name__ == "__main__":
    unwind_on_sigterm()
    sys.exit(run(main))
