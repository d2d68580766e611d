#!/usr/bin/env bash
# Join a node to the Ray cluster on which verl runs; once on every node, the first one first. NOT RUN on more than one machine.
#
#   NODE_RANK=0 MASTER_ADDR=10.0.0.1 DEVICE=npu DEVICES_PER_NODE=16 bash examples/verl/start_ray.sh
#
# One node needs none of this: verl starts Ray itself. `ray stop` on every node ends the cluster.
# DRY_RUN=1 prints the command.
set -euo pipefail
RAY_PORT="${RAY_PORT:-6379}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

RAY="${RAY:-ray}" # of verl's environment
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
resources=(--num-gpus "$DEVICES_PER_NODE")
if [[ "$DEVICE" == npu ]]; then
  npu_environment
  resources=(--resources "{\"NPU\": $DEVICES_PER_NODE}")
fi
if [[ "$NODE_RANK" == 0 ]]; then
  run_or_print "$RAY" start --head --node-ip-address "$MASTER_ADDR" --port "$RAY_PORT" "${resources[@]}" "$@"
else
  run_or_print "$RAY" start --address "$MASTER_ADDR:$RAY_PORT" "${resources[@]}" "$@"
fi
