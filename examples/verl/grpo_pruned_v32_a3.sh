#!/usr/bin/env bash
# GRPO of an expert-pruned DeepSeek-V3.2 on four Atlas A3 nodes (64 dies): Megatron (MindSpeed) trains, vllm-ascend answers.
# NOT RUN: no NPU, no V3.2 weights; tests compose verl's configuration. Stock verl 0.9.1 cannot run it either: Megatron-Bridge up to 0.7
# has no bridge for DeepseekV32ForCausalLM, so BRIDGE_LIB must name a module that registers yours (docs/verl.md).
#
#   on all nodes:  NODE_RANK=0..3 MASTER_ADDR=first-node DEVICE=npu bash examples/verl/start_ray.sh
#   on the first:  MODEL=/shared/v32_pruned DATA=/shared/grpo_data BRIDGE_LIB=my_bridge bash examples/verl/grpo_pruned_v32_a3.sh
#
# MODEL is what examples/prune/prune.sh left: KEEP must be divisible by EP. Every variable here and in common.sh is a setting.
# DRY_RUN=1 prints the command and verl's configuration.
set -euo pipefail

TRAINER="${TRAINER:-megatron}"
DEVICE="${DEVICE:-npu}"
NNODES="${NNODES:-4}"
DEVICES_PER_NODE="${DEVICES_PER_NODE:-16}"
ROLLOUT="${ROLLOUT:-vllm-ascend}"
TP="${TP:-4}" PP="${PP:-4}" EP="${EP:-16}"        # EP spans the 16 dies of a pipeline stage
FIRST_STAGE_LAYERS="${FIRST_STAGE_LAYERS-16}"     # 61 layers: 16 + 3 * 15
ROLLOUT_TP="${ROLLOUT_TP:-16}"
ROLLOUT_EP="${ROLLOUT_EP:-16}"
OFFLOAD="${OFFLOAD:-1}"
ROUTER_REPLAY="${ROUTER_REPLAY:-R3}" # the trainer takes the engine's routes: a mismatch that stays is not the router's
TRAIN_BATCH_SIZE="${TRAIN_BATCH_SIZE:-64}"
OUTPUT="${OUTPUT:-runs/grpo/pruned_v32_a3}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

grpo "$@"
