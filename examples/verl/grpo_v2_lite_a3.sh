#!/usr/bin/env bash
# GRPO of the upcycled DeepSeek-V2-Lite on two Atlas A3 nodes (32 dies): FSDP2 trains, vllm-ascend answers, from one directory.
# NOT RUN on an NPU so far: tests compose verl's configuration and run its FSDP update of a small model on a CPU.
#
#   on both nodes:  NODE_RANK=0|1 MASTER_ADDR=first-node DEVICE=npu bash examples/verl/start_ray.sh
#   on the first:   MODEL=/shared/v2_lite_native DATA=/shared/grpo_data bash examples/verl/grpo_v2_lite_a3.sh
#
# MODEL (dsa-upcycle export --layout native), DATA (data/prepare_rl.py) and this repository stand at the same path on both nodes. Every
# variable here and in common.sh is a setting; words that follow go to verl: grpo_v2_lite_a3.sh trainer.val_before_train=False
# DRY_RUN=1 prints the command and verl's configuration.
set -euo pipefail

TRAINER="${TRAINER:-fsdp2}" # fsdp, fsdp2, or megatron (MindSpeed) with BRIDGE_LIB
DEVICE="${DEVICE:-npu}"
NNODES="${NNODES:-2}"
DEVICES_PER_NODE="${DEVICES_PER_NODE:-16}" # dies of 64 GB: 17 billion weights with Adam in fp32 are 8.5 GB a die
ROLLOUT="${ROLLOUT:-vllm-ascend}"          # or sglang
ROLLOUT_TP="${ROLLOUT_TP:-4}"              # must divide the 16 attention heads
OUTPUT="${OUTPUT:-runs/grpo/v2_lite_a3}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

grpo "$@"
