#!/usr/bin/env bash
# A larger model of the demo's kind, all of whose layers are DSA: what benchmarks/fault_sensitivity.py compares the proxy with.
#
#   bash benchmarks/twin.sh OUTPUT
#
# A base of twice the depth and 1.5 times the width learns the demo's tasks; two DSA layers are trained on top, then indexers
# for the base's layers; the native layout makes every layer DSA. About 20 minutes on one core.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
OUT="${1:?usage: bash benchmarks/twin.sh OUTPUT}"
