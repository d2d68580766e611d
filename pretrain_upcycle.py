"""Upcycle a DeepSeek-V2-Lite base: append DSA layers, freeze the base, train the new layers on text.

On this machine's CPU:

    python pretrain_upcycle.py --base-model BASE --data-path PREFIX --save OUT --train-iters 100 \
        --seq-length 256 --index-topk 32 --index-n-heads 4 --index-head-dim 32

The real job (one rank a device: 8, or what there is):

    torchrun --nproc-per-node 8 pretrain_upcycle.py --base-model DeepSeek-V2-Lite-Chat --data-path PREFIX --save OUT \
        --bf16 --seq-length 4096 --train-iters 2000 --global-batch-size 64 --indexer-warmup-iters 200

Indexers for the base's own layers, which the native layout needs beyond top-k (docs/native.md):

    python pretrain_upcycle.py --train base-indexers --base-model BASE --data-path PREFIX --save OUT --train-iters 400 --lr 1e-3

A stopped run goes on with `--load OUT --save OUT` and the same flags. `examples/deepseek_v2_lite/pretrain.sh` holds the
recommended values.
"""

import sys

from megatron_patch import errors


def main() -> int:
    from megatron_patch.config import PRETRAIN, TrainSettings
    from megatron_patch.devices.device import activate
    from megatron_patch.flags import parse

    settings = parse(TrainSettings, sys.argv[1:], prog="pretrain_upcycle.py", description=__doc__)
    device = activate(settings.precision.device)

    from megatron_patch.training.loop import train  # imports megatron.core, which the device had to precede

    return train(settings, PRETRAIN, device)


if __name__ == "__main__":
    sys.exit(errors.run(main))
