# Sourced: how a script hands the signals that it gets to the program that it runs, instead of dying over it.
# shellcheck shell=bash

# The signal that attend handed on last; empty: none came.
SIGNALLED=""

# attend command|workers COMMAND...: run the command and wait for it, and return its status. Until it ends, SIGTERM and
# SIGUSR1 go on to it, SIGINT (Ctrl-C) and SIGHUP go on as SIGTERM. `workers` hands them to the command's children: torchrun
# itself would end them after 30 seconds and leave with 1, while they, asked alone, save and leave with 0, and so it does.
attend() {
  local who=$1 status passed
  shift
  SIGNALLED=""
  setsid "$@" & # a session of its own: a terminal's Ctrl-C comes from here alone, not twice
  local pid=$!
  trap 'passed=1; hand_on "$who" "$pid" TERM' TERM INT HUP
  trap 'passed=1; hand_on "$who" "$pid" USR1' USR1
  while :; do
    passed=0 status=0
    wait "$pid" || status=$?
    ((passed)) || break # a signal ends `wait` too
  done
  trap - TERM INT HUP USR1
  return "$status"
}

# hand_on command|workers PID SIGNAL
hand_on() {
  local pids=("$2")
  # shellcheck disable=SC2034  # read by the scripts that source this file
  SIGNALLED=$3
  if [[ "$1" == workers ]]; then
    mapfile -t pids < <(grep -l "^PPid:[[:space:]]*$2\$" /proc/[0-9]*/status 2> /dev/null | cut -d/ -f3)
    ((${#pids[@]})) || pids=("$2")
  fi
  kill -s "$3" "${pids[@]}" 2> /dev/null || true # it may have ended by itself
}
