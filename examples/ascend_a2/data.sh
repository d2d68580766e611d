#!/usr/bin/env bash
# Text and chats to tokens, on the CPU cores of one Atlas A2 node; every node needs the result.
#
#   BASE_MODEL=/models/DeepSeek-V2-Lite-Chat TEXT="corpus/*.jsonl.zst" CHATS=chats.jsonl bash examples/ascend_a2/data.sh
#
# TEXT (files, a pattern may stand for them) becomes $TEXT_PREFIX, CHATS the folder $CHATS_FOLDER; one of the two is enough.
# DRY_RUN=1 prints the commands.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

TEXT="${TEXT:-}"                                 # for pretrain.sh
CHATS="${CHATS:-}"                               # for sft.sh
TEXT_KEY="${TEXT_KEY:-text}"                     # of a row of TEXT
TEXT_PREFIX="${TEXT_PREFIX:-runs/v2_lite/text}"  # DATA_PATH of pretrain.sh
CHATS_FOLDER="${CHATS_FOLDER:-runs/v2_lite/chats}" # DATA_PATH of sft.sh
WORKERS="${WORKERS:-16}"                         # processes that read
prepare_data
