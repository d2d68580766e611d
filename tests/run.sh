#!/usr/bin/env bash
# Set up, lint, test. Arguments go to pytest: bash tests/run.sh tests/ops -k selection
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"

if [[ "${1:-}" == --help ]]; then
  echo "usage: bash tests/run.sh [pytest arguments]    sets up .venv and .venv-verl, then ruff, then pytest"
  echo "PYTEST_WORKERS=N: processes that test at once, by whole files; 0: none but pytest itself, as a debugger needs it."
  echo "Unless set: 2 without arguments; 0 with arguments, since a few files take less time than workers to start."
  exit 0
fi

bash examples/setup_env.sh --verl
# Tests use small shapes: more threads than cores, or threads at all, only slow them down.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline
export MPLCONFIGDIR="${MPLCONFIGDIR:-$ROOT/.venv/cache/matplotlib}" HF_HOME="${HF_HOME:-$ROOT/.venv/cache/huggingface}"
.venv/bin/ruff check .
workers="${PYTEST_WORKERS:-$((2 * ($# == 0)))}"
parallel=()
# By files: models, runs and exports that a file's tests share are then made once. tests/conftest.py orders the files.
[[ "$workers" == 0 ]] || parallel=(-n "$workers" --dist loadfile --no-loadscope-reorder)
exec .venv/bin/python -m pytest -q "${parallel[@]}" "$@"
