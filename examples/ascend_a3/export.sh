#!/usr/bin/env bash
# Make a Hugging Face directory of the trained layers and the base, and check it. Runs on the CPU of the node that has the checkpoint.
#
#   BASE_MODEL=/models/DeepSeek-V2-Lite-Chat bash examples/ascend_a3/export.sh
#
# Settings: examples/deepseek_v2_lite/export.sh. For verl and vllm-ascend: export.sh --layout native (docs/native.md)
# DRY_RUN=1 prints the commands.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

step export "$@"
