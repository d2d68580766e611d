#!/usr/bin/env bash
# Observe on vLLM, the engine that serves the model: it answers prompts and records the chosen experts, which become
# statistics. NOT RUN against a real vLLM so far: its interface is as documented, tests run it against a stand-in.
#
#   MODEL=/models/DeepSeek-V3.2 DATA=prompts.jsonl TENSOR_PARALLEL_SIZE=16 bash examples/prune/observe_vllm.sh
#
# MODEL      the Hugging Face directory of the model
# DATA       JSON lines of {"messages": [...]} or {"text": ...}
# GENERATE   most tokens of an answer
# OUTPUT     default: runs/prune/statistics.safetensors
# VLLM_PYTHON  the Python that has vLLM; default: python. dsa-upcycle may be in another environment
# Expert ids carry no routing weights: plan with --criterion frequency. DRY_RUN=1 prints the commands.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../deepseek_v2_lite/common.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

need MODEL "the Hugging Face directory of the model"
need DATA "a file of JSON lines"
OUTPUT="${OUTPUT:-runs/prune/statistics.safetensors}" GENERATE="${GENERATE:-256}" MAX_LENGTH="${MAX_LENGTH:-4096}"
TENSOR_PARALLEL_SIZE="${TENSOR_PARALLEL_SIZE:-1}" VLLM_PYTHON="${VLLM_PYTHON:-python}"
SOURCE="${SOURCE:-$(basename "${DATA%.*}")}"
recorded="${OUTPUT%.safetensors}.routed_experts.jsonl"

program="$(tool dsa-upcycle)"
[[ "$DRY_RUN" == 1 ]] || mkdir -p "$(dirname "$OUTPUT")"
run_or_print "$VLLM_PYTHON" "$ROOT/examples/prune/record_vllm.py" --model "$MODEL" --data "$DATA" --output "$recorded" \
  --generate "$GENERATE" --max-length "$MAX_LENGTH" --tensor-parallel-size "$TENSOR_PARALLEL_SIZE" "$@"
run_or_print "$program" prune observe --model "$MODEL" --from-routed-experts "$recorded" --source "$SOURCE" --output "$OUTPUT"
