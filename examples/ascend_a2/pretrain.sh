#!/usr/bin/env bash
# Upcycle pretraining of DeepSeek-V2-Lite on Atlas A2.
#
#   BASE_MODEL=/models/DeepSeek-V2-Lite-Chat DATA_PATH=runs/v2_lite/text bash examples/ascend_a2/pretrain.sh
#
# Settings: env.sh beside this file, and examples/deepseek_v2_lite/pretrain.sh. More flags can follow: pretrain.sh --seed 7
# Two nodes, on both of them, NODE_RANK=1 on the second:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 HCCL_SOCKET_IFNAME=eth0 BASE_MODEL=... DATA_PATH=... bash examples/ascend_a2/pretrain.sh
# DRY_RUN=1 prints the plan and the command.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

train pretrain "$@"
