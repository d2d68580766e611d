#!/usr/bin/env bash
# Score the export against its base on one device of an Atlas A2 node, with and without its DSA layers.
#
#   BASE_MODEL=/models/DeepSeek-V2-Lite-Chat SUITE=my_suite bash examples/ascend_a2/evaluate.sh
#
# Settings: examples/deepseek_v2_lite/evaluate.sh. ENDPOINT=http://host:8000 scores what vllm-ascend serves instead of the export.
# DRY_RUN=1 prints the command.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

step evaluate "$@"
