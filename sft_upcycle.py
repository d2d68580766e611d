"""Supervised fine-tuning of the DSA layers on chats; the base stays frozen.

On this machine's CPU:

    python sft_upcycle.py --base-model BASE --data-path PREFIX --save OUT --train-iters 100 \
        --seq-length 256 --index-topk 32 --index-n-heads 4 --index-head-dim 32

The real job (one rank a device: 8, or what there is):

    torchrun --nproc-per-node 8 sft_upcycle.py --base-model DeepSeek-V2-Lite-Chat --data-path PREFIX --save OUT \
        --bf16 --seq-length 4096 --train-iters 2000 --global-batch-size 64 --indexer-warmup-iters 200

A stopped run goes on with `--load OUT --save OUT` and the same flags. `examples/deepseek_v2_lite/sft.sh` holds the
recommended values.
"""

import sys

from megatron_patch import errors


def main() -> int:
    from megatron_patch.config import SFT, TrainSettings
    from megatron_patch.devices.device import activate
    from megatron_patch.flags import parse

    settings = parse(TrainSettings, sys.argv[1:], prog="sft_upcycle.py", description=__doc__)
    device = activate(settings.precision.device)

    from megatron_patch.training.loop import train  # imports megatron.core, which the device had to precede

    return train(settings, SFT, device)


if __name__ == "__main__":
    sys.exit(errors.run(main))
