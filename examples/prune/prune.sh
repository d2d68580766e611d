#!/usr/bin/env bash
# Prune a model to the experts that your data use: observe -> plan -> apply -> verify -> report -> evaluate.
#
#   MODEL=/models/DeepSeek-V2-Lite-Chat DATA="code.jsonl maths.jsonl" KEEP=32 bash examples/prune/prune.sh
#
# MODEL      the Hugging Face directory of the model
# DATA       files of JSON lines, each a source of its own; CHAT=1 where rows are {"messages": [...]}
# STATS      statistics that are there already (of observe_vllm.sh, observe_sglang.sh or merged), instead of DATA
# KEEP       experts that each layer keeps; CRITERION: frequency (default), gate_sum, reap
# SUITE      folder of tasks to score before and after; without it nothing is scored
# OUTPUT     default: runs/prune. A second run with the same settings reuses what is done there
# Whether KEEP is feasible is checked first. More flags go to `dsa-upcycle prune plan`: prune.sh --groups flatten --dry-run heldout.jsonl
# DRY_RUN=1 prints the commands.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../deepseek_v2_lite/common.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

need MODEL "the Hugging Face directory of the model"
need KEEP "the number of experts that each layer keeps"
STATS="${STATS:-}" OUTPUT="${OUTPUT:-runs/prune}" CRITERION="${CRITERION:-frequency}" SUITE="${SUITE:-}"
BATCH_SIZE="${BATCH_SIZE:-8}" MAX_LENGTH="${MAX_LENGTH:-2048}" GENERATE="${GENERATE:-0}" DTYPE="${DTYPE:-bfloat16}"
where=() rows=()
[[ -z "$DEVICE" ]] || where=(--device "$DEVICE")
[[ "${CHAT:-0}" != 1 ]] || rows=(--chat)

program="$(tool dsa-upcycle)"
run_or_print "$program" prune plan --model "$MODEL" --keep "$KEEP" --check-only "$@"

wanted="MODEL=$MODEL KEEP=$KEEP CRITERION=$CRITERION STATS=$STATS DATA=${DATA:-} CHAT=${CHAT:-0} GENERATE=$GENERATE $*"
if [[ -f "$OUTPUT/settings" && "$(cat "$OUTPUT/settings")" != "$wanted" ]]; then
  fail "$OUTPUT is of other settings ($(cat "$OUTPUT/settings")): give another OUTPUT, or remove it"
fi
[[ "$DRY_RUN" == 1 ]] || { mkdir -p "$OUTPUT" && echo "$wanted" > "$OUTPUT/settings"; }

if [[ -z "$STATS" ]]; then
  need DATA "one or more files of JSON lines"
  STATS="$OUTPUT/statistics.safetensors"
  read -r -a files <<< "$DATA"
  if [[ ! -f "$STATS" ]]; then
    run_or_print "$program" prune observe --model "$MODEL" --data "${files[@]}" "${rows[@]}" --batch-size "$BATCH_SIZE" \
      --max-length "$MAX_LENGTH" --generate "$GENERATE" "${where[@]}" --resume --output "$STATS"
  fi
fi
if [[ ! -f "$OUTPUT/plan.json" ]]; then
  run_or_print "$program" prune plan --model "$MODEL" --stats "$STATS" --keep "$KEEP" --criterion "$CRITERION" "$@" \
    --output "$OUTPUT/plan.json"
fi
if [[ ! -f "$OUTPUT/model/config.json" ]]; then
  resume=()
  [[ ! -d "$OUTPUT/.model.partial-prune" ]] || resume=(--resume) # of a run that was killed
  run_or_print "$program" prune apply --model "$MODEL" --plan "$OUTPUT/plan.json" "${resume[@]}" --output "$OUTPUT/model"
fi
run_or_print "$program" prune verify --model "$MODEL" --pruned "$OUTPUT/model" --plan "$OUTPUT/plan.json"
if [[ ! -d "$OUTPUT/report" ]]; then
  run_or_print "$program" prune report --stats "$STATS" --plan "$OUTPUT/plan.json" --output "$OUTPUT/report"
fi
if [[ -n "$SUITE" && ! -d "$OUTPUT/evaluation" ]]; then
  run_or_print "$program" evaluate --kind prune --base "$MODEL" --model "$OUTPUT/model" --suite "$SUITE" \
    --dtype "$DTYPE" "${where[@]}" --output "$OUTPUT/evaluation"
fi
