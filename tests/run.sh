#!/usr/bin/env bash
# Set up, lint, test. Arguments go to pytest: bash tests/run.sh tests/ops -k selection
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"

if [[ "${1:-}" == --help ]]; then
  echo "usage: bash tests/run.sh [pytest arguments]    sets up .venv and .venv-verl, then ruff, then pytest"
  exit 0
fi

bash examples/setup_env.sh --verl
# Tests use small shapes: more threads than cores, or threads at all, only slow them down.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline
export MPLCONFIGDIR="${MPLCONFIGDIR:-$ROOT/.venv/cache/matplotlib}" HF_HOME="${HF_HOME:-$ROOT/.venv/cache/huggingface}"
.venv/bin/ruff check .
exec .venv/bin/python -m pytest -q "$@"
