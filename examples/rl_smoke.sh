#!/usr/bin/env bash
# Can RL run on the proxy? TRL's GRPOTrainer on the CPU trains the quickstart's export on a task with exact answers, three
# seeds, some minutes. More flags go to examples/rl_smoke.py (--help), e.g. --fault sigmoid_router for rollouts with a fault.
#
#   bash examples/rl_smoke.sh [FLAGS]
#
# EXPORT=DIR    default: runs/quickstart/export, what the quickstart leaves
# OUTPUT=DIR    default: runs/rl_smoke; must be new
# SEEDS="1 2 3" one run each
# DRY_RUN=1     print the command
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
EXPORT="${EXPORT:-runs/quickstart/export}" OUTPUT="${OUTPUT:-runs/rl_smoke}" SEEDS="${SEEDS:-1 2 3}" DRY_RUN="${DRY_RUN:-0}"

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 0
fi

# Shapes are small: a second thread gains nothing.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export MPLCONFIGDIR="${MPLCONFIGDIR:-$ROOT/.venv/cache/matplotlib}" HF_HOME="${HF_HOME:-$ROOT/.venv/cache/huggingface}"
read -ra seeds <<< "$SEEDS"
command=(python "$ROOT/examples/rl_smoke.py" --export "$EXPORT" --output "$OUTPUT" --seeds "${seeds[@]}" "$@")
if [[ "$DRY_RUN" == 1 ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
if [[ ! -f "$EXPORT/config.json" ]]; then
  echo "error: EXPORT must be an export of the quickstart: $EXPORT has no config.json; run bash examples/quickstart.sh first" >&2
  exit 2
fi
bash "$ROOT/examples/setup_env.sh"
export PATH="$ROOT/.venv/bin:$PATH"
exec "${command[@]}"
