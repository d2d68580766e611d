"""What the model sees of prepared data: token boundaries, document boundaries, and in colour which tokens are learned.

    python data/show_samples.py runs/chats --n 3        # a folder of prepare_sft.py
    python data/show_samples.py runs/text               # a prefix of prepare_pretrain.py
    python data/show_samples.py runs/v2_lite/sft/non_finite/iter_0000123_rank0000.safetensors    # what a run ended with

Without a terminal, or with NO_COLOR set, learned tokens stand in [[ ]].
"""

import sys
import warnings

from megatron_patch.data.show import ShowSettings, show_samples
from megatron_patch.errors import run
from megatron_patch.flags import parse


def main() -> None:
    # megatron-core warns at import of each optional package that is absent; none of them reads or writes data.
    warnings.filterwarnings("ignore", module=r"megatron\.core.*")
    show_samples(parse(ShowSettings, sys.argv[1:], "show_samples.py", __doc__))


if __name__ == "__main__":
    sys.exit(run(main))
