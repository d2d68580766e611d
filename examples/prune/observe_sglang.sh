#!/usr/bin/env bash
# Observe on a running SGLang server: it answers prompts and returns the chosen experts, which become statistics.
# NOT RUN against a real SGLang so far: its interface is as documented, tests run it against a stand-in.
#
#   python -m sglang.launch_server --model-path /models/DeepSeek-V3.2 --tp 16 --enable-return-routed-experts &
#   MODEL=/models/DeepSeek-V3.2 DATA=prompts.jsonl bash examples/prune/observe_sglang.sh
#
# MODEL      the Hugging Face directory of the model
# DATA       JSON lines of {"messages": [...]} or {"text": ...}
# URL        default: http://127.0.0.1:30000
# GENERATE   most tokens of an answer
# OUTPUT     default: runs/prune/statistics.safetensors
# PYTHON     a Python with transformers, for the chat template; default: python
# Expert ids carry no routing weights: plan with --criterion frequency. With attention data parallelism some releases
# return zeros only, which is refused. DRY_RUN=1 prints the commands.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../deepseek_v2_lite/common.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

need MODEL "the Hugging Face directory of the model"
need DATA "a file of JSON lines"
OUTPUT="${OUTPUT:-runs/prune/statistics.safetensors}" URL="${URL:-http://127.0.0.1:30000}" GENERATE="${GENERATE:-256}"
SOURCE="${SOURCE:-$(basename "${DATA%.*}")}"
recorded="${OUTPUT%.safetensors}.routed_experts.jsonl"

program="$(tool dsa-upcycle)" PYTHON="${PYTHON:-$(tool python)}"
[[ "$DRY_RUN" == 1 ]] || mkdir -p "$(dirname "$OUTPUT")"
run_or_print "$PYTHON" "$ROOT/examples/prune/record_sglang.py" --url "$URL" --model "$MODEL" --data "$DATA" \
  --output "$recorded" --generate "$GENERATE" "$@"
run_or_print "$program" prune observe --model "$MODEL" --from-routed-experts "$recorded" --source "$SOURCE" --output "$OUTPUT"
