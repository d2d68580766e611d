#!/usr/bin/env bash
# Make a Hugging Face directory of a trained checkpoint and its base, and check it against the base.
#
#   BASE_MODEL=/models/DeepSeek-V2-Lite-Chat bash examples/deepseek_v2_lite/export.sh
#
# CHECKPOINT is the SAVE of sft.sh (or of pretrain.sh). More flags go to `dsa-upcycle export`: export.sh --iteration 400
# For inference engines and verl: export.sh --layout native --base-indexers runs/v2_lite/indexers (docs/native.md)
# DRY_RUN=1 prints the commands.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

need BASE_MODEL "the Hugging Face directory of the base"
CHECKPOINT="${CHECKPOINT:-runs/v2_lite/sft}"
OUTPUT="${OUTPUT:-runs/v2_lite/export}"
BASE_SHARDS="${BASE_SHARDS:-copy}" # symlink saves the base's size on disk

program="$(tool dsa-upcycle)"
run_or_print "$program" export --checkpoint "$CHECKPOINT" --base "$BASE_MODEL" --output "$OUTPUT" \
  --base-shards "$BASE_SHARDS" "$@"
run_or_print "$program" check "$OUTPUT" --base "$BASE_MODEL"
