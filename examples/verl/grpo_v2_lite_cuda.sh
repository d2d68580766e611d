#!/usr/bin/env bash
# GRPO of the upcycled DeepSeek-V2-Lite on one CUDA node: FSDP2 trains, vLLM (or SGLang) answers, both from one directory.
# NOT RUN on a GPU so far: tests compose verl's configuration and run its FSDP update of a small model on a CPU.
#
#   python data/prepare_rl.py --output runs/grpo/data
#   MODEL=runs/v2_lite/native DATA=runs/grpo/data bash examples/verl/grpo_v2_lite_cuda.sh
#
# MODEL is an export in the native layout: dsa-upcycle export --layout native (docs/verl.md). Every variable here and in common.sh is a
# setting; words that follow go to verl: grpo_v2_lite_cuda.sh trainer.val_before_train=False
# DRY_RUN=1 prints the command and verl's configuration.
set -euo pipefail

TRAINER="${TRAINER:-fsdp2}" # fsdp, fsdp2, or megatron with BRIDGE_LIB
DEVICE="${DEVICE:-cuda}"
DEVICES_PER_NODE="${DEVICES_PER_NODE:-8}" # of 80 GB: 17 billion weights with Adam in fp32 are 34 GB a device
ROLLOUT="${ROLLOUT:-vllm}"
ROLLOUT_TP="${ROLLOUT_TP:-4}" # must divide the 16 attention heads
OFFLOAD="${OFFLOAD:-1}"
OUTPUT="${OUTPUT:-runs/grpo/v2_lite_cuda}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

grpo "$@"
