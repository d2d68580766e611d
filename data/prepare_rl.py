"""Questions with exact answers -> the parquet files that verl's GRPO reads.

    python data/prepare_rl.py --output runs/grpo/data                       # arithmetic, made on the spot
    python data/prepare_rl.py --input questions.jsonl --answer number --output runs/grpo/data

Rows are {"question": ..., "answer": ...} or {"messages": [...], "answer": ...}. Writes train.parquet, validation.parquet,
sft.parquet (the training questions with answers, as chats) and meta.json (counts, dropped rows by reason).
"""

import sys

from megatron_patch.data.rl_corpus import RlCorpusSettings, prepare_rl
from megatron_patch.errors import run, unwind_on_sigterm
from megatron_patch.flags import parse


def main() -> None:
    prepare_rl(parse(RlCorpusSettings, sys.argv[1:], "prepare_rl.py", __doc__))


if __name__ == "__main__":
    unwind_on_sigterm()
    sys.exit(run(main))
