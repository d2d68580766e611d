#!/usr/bin/env bash
# GRPO of an expert-pruned DeepSeek-V4-Flash on two Atlas A3 nodes (32 dies): Megatron (MindSpeed) trains, vllm-ascend answers.
# NOT RUN: no NPU, no V4 weights; tests compose verl's configuration. On Ascend the published V4-Flash runs use a patched verl with
# MindSpeed-LLM, whose keys (actor.mindspeed) verl 0.9.1 has not; BRIDGE_LIB must name the module that registers your bridge (docs/verl.md).
#
#   on both nodes:  NODE_RANK=0|1 MASTER_ADDR=first-node DEVICE=npu bash examples/verl/start_ray.sh
#   on the first:   MODEL=/shared/v4_pruned DATA=/shared/grpo_data BRIDGE_LIB=my_bridge bash examples/verl/grpo_pruned_v4_flash_a3.sh
#
# MODEL is what examples/prune/prune.sh left, with bf16 weights and a chat_template.jinja of your own, which V4 does not ship: KEEP must
# be divisible by EP. Every variable here and in common.sh is a setting. DRY_RUN=1 prints the command and verl's configuration.
set -euo pipefail

TRAINER="${TRAINER:-megatron}"
DEVICE="${DEVICE:-npu}"
NNODES="${NNODES:-2}"
DEVICES_PER_NODE="${DEVICES_PER_NODE:-16}"
ROLLOUT="${ROLLOUT:-vllm-ascend}"
TP="${TP:-4}" PP="${PP:-2}" EP="${EP:-16}"    # EP spans the 16 dies of a pipeline stage
FIRST_STAGE_LAYERS="${FIRST_STAGE_LAYERS-21}" # 43 layers: 21 + 22
ROLLOUT_TP="${ROLLOUT_TP:-8}"
ROLLOUT_EP="${ROLLOUT_EP:-8}"
OFFLOAD="${OFFLOAD:-1}"
ROUTER_REPLAY="${ROUTER_REPLAY:-disabled}" # the hash-routed layers have nothing to replay; untried with V4
OUTPUT="${OUTPUT:-runs/grpo/pruned_v4_flash_a3}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

grpo "$@"
