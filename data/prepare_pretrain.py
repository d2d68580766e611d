"""Text files -> token files for pretraining.

    python data/prepare_pretrain.py --input books.jsonl more.jsonl.zst --tokenizer BASE --output-prefix runs/text

Writes runs/text.bin and .idx (megatron-core's IndexedDataset; each document is BOS + tokens + EOS) and runs/text.json
(counts, dropped rows by reason, hashes). A row that is no JSON or lacks the key stops the run, named as file:line.
"""

import sys
import warnings

from megatron_patch.data.pretrain_corpus import PretrainCorpusSettings, prepare_pretrain
from megatron_patch.errors import run, unwind_on_sigterm
from megatron_patch.flags import parse


def main() -> None:
    # megatron-core warns at import of each optional package that is absent; none of them reads or writes data.
    warnings.filterwarnings("ignore", module=r"megatron\.core.*")
    prepare_pretrain(parse(PretrainCorpusSettings, sys.argv[1:], "prepare_pretrain.py", __doc__))


if __name__ == "__main__":
    unwind_on_sigterm()
    sys.exit(run(main))
