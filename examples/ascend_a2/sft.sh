#!/usr/bin/env bash
# Supervised fine-tuning of the DSA layers on Atlas A2, from the weights of pretrain.sh.
#
#   BASE_MODEL=/models/DeepSeek-V2-Lite-Chat DATA_PATH=runs/v2_lite/chats bash examples/ascend_a2/sft.sh
#
# Settings: env.sh beside this file, and examples/deepseek_v2_lite/sft.sh. More flags can follow: sft.sh --seed 7
# Two nodes: as pretrain.sh. DRY_RUN=1 prints the plan and the command.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

train sft "$@"
