#!/usr/bin/env bash
# Build the Python environments in the repository: .venv for everything, and with --verl also .venv-verl, in which tests run
# verl 0.9.1 itself on exports (with its transformers 5.9.0). Done once; done again only when requirements change.
#
#   bash examples/setup_env.sh [--verl]
#
# PYTHON=/path/to/python3.11 chooses the interpreter. pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) apply.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() { sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

fail() {
  echo "error: $1" >&2
  exit 2
}

# Print the path of a Python 3.11 that can make environments.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      "$candidate" -c 'import ensurepip, venv' 2>/dev/null \
        || fail "$candidate cannot make environments: it lacks venv or ensurepip; apt-get install python3.11-venv"
      command -v "$candidate"
      return
    fi
  done
  fail "Python 3.11 is needed: neither ${PYTHON:-python3.11} nor python3 is one; install it (apt-get install python3.11 \
python3.11-venv, or conda create -n py311 python=3.11) or set PYTHON=/path/to/python3.11"
}

# build_env DIRECTORY REQUIREMENTS INSTALL_PACKAGE(yes|no)
build_env() {
  local env="$ROOT/$1" requirements="$ROOT/requirements/$2" install_package=$3 wanted started python alone
  alone="${requirements%.txt}.no-deps.txt" # what would pull more than is needed
  [[ -f "$alone" ]] || alone=/dev/null
  wanted="$(cat "$requirements" "$alone" "$ROOT/setup.py" | cksum) $ROOT"
  [[ "$(cat "$env/.complete" 2>/dev/null || true)" == "$wanted" ]] && return 0
  started=$SECONDS
  echo "[setup] $1: $(grep -c '==' "$requirements") pinned packages from requirements/$2 (1 to 2.5 GB on disk, some minutes)"
  rm -f "$env/.complete"
  if [[ ! -x "$env/bin/python" ]]; then
    python="$(find_python)"
    "$python" -m venv "$env"
  fi
  "$env/bin/python" -m pip install -qq --no-input --disable-pip-version-check -r "$requirements" \
    || fail "pip could not install requirements/$2 (its message is above): check the network or PIP_INDEX_URL, and run again"
  if [[ "$alone" != /dev/null ]]; then
    "$env/bin/python" -m pip install -qq --no-input --disable-pip-version-check --no-deps -r "$alone" \
      || fail "pip could not install ${alone#"$ROOT"/} (its message is above): check the network or PIP_INDEX_URL, and run again"
  fi
  if [[ "$install_package" == yes ]]; then
    "$env/bin/python" -m pip install -qq --no-input --disable-pip-version-check --no-deps --no-build-isolation \
      -e "$ROOT" || fail "pip could not install the package itself (its message is above)"
  fi
  echo "$wanted" > "$env/.complete"
  echo "[setup] $1 is ready after $((SECONDS - started)) s"
}

main() {
  local with_verl=no
  for argument in "$@"; do
    case "$argument" in
      --verl) with_verl=yes ;;
      -h | --help)
        usage
        return
        ;;
      *) fail "unknown flag $argument; flags: --verl, --help" ;;
    esac
  done
  # One at a time: the quickstart and the tests may start together.
  if command -v flock > /dev/null; then
    mkdir -p "$ROOT/.venv"
    exec 9> "$ROOT/.venv/.lock"
    flock 9
  fi
  build_env .venv cpu.txt yes
  [[ "$with_verl" == no ]] || build_env .venv-verl verl.txt no
}

main "$@"
