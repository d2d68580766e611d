#!/usr/bin/env bash
# Score an export against its base, with and without its DSA layers.
#
#   BASE_MODEL=/models/DeepSeek-V2-Lite-Chat SUITE=my_suite bash examples/deepseek_v2_lite/evaluate.sh
#
# SUITE is a folder with suite.json and the task files that it names (docs/evaluate.md). ENDPOINT=http://host:8000 scores what a
# server serves instead of the export, without the ablations. More flags go to `dsa-upcycle evaluate`:
# evaluate.sh --limit 100
# DRY_RUN=1 prints the command.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

need BASE_MODEL "the Hugging Face directory of the base"
need SUITE "the folder of tasks"
MODEL="${MODEL:-runs/v2_lite/export}"
OUTPUT="${OUTPUT:-runs/v2_lite/evaluation}"
DTYPE="${DTYPE:-bfloat16}"
BATCH_SIZE="${BATCH_SIZE:-16}"
scored=(--model "$MODEL") where=()
[[ -z "${ENDPOINT:-}" ]] || scored=(--endpoint "$ENDPOINT")
[[ -z "$DEVICE" ]] || where=(--device "$DEVICE")

program="$(tool dsa-upcycle)"
run_or_print "$program" evaluate --base "$BASE_MODEL" "${scored[@]}" --suite "$SUITE" --output "$OUTPUT" \
  --dtype "$DTYPE" --batch-size "$BATCH_SIZE" "${where[@]}" "$@"
