"""What the model sees of prepared data: token boundaries, document boundaries, and in colour which tokens are learned.

    python data/show_samples.py runs/chats --n 3        # a folder of prepare_sft.py
    python data/show_samples.py runs/text               # a prefix of prepare_pretrain.py

Without a terminal, or with NO_COLOR set, learned tokens stand in [[ ]].
"""

import sys

import tyro

from megatron_patch.data.show import ShowSettings, show_samples
from megatron_patch.errors import run


def main() -> None:
    show_samples(tyro.cli(ShowSettings, description=__doc__))


if __name__ == "__main__":
    sys.exit(run(main))
