#!/usr/bin/env bash
# Upcycle pretraining: append DSA layers to the base, freeze the base, train the new layers on text.
#
#   BASE_MODEL=/models/DeepSeek-V2-Lite-Chat DATA_PATH=runs/v2_lite/text bash examples/deepseek_v2_lite/pretrain.sh
#
# DATA_PATH is what data/prepare_pretrain.py wrote: a prefix, or weights and prefixes ("0.3 P1 0.7 P2"). A run that was
# stopped resumes from SAVE. Every variable below is a setting; more flags can follow: pretrain.sh --deterministic
# DRY_RUN=1 prints the command.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

need BASE_MODEL "the Hugging Face directory of the base"
need DATA_PATH "the prefix that data/prepare_pretrain.py wrote"
VALID_DATA_PATH="${VALID_DATA_PATH:-}" # empty: SPLIT holds a part of DATA_PATH out
SPLIT="${SPLIT:-99,1}"
SAVE="${SAVE:-runs/v2_lite/pretrain}"

SEQ_LENGTH="${SEQ_LENGTH:-4096}"
MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}"
TRAIN_ITERS="${TRAIN_ITERS:-2000}"
OPTIMIZER="${OPTIMIZER:-adam}" # adam, sgd or muon
LR="${LR:-1e-4}"
MIN_LR="${MIN_LR:-1e-5}"
LR_WARMUP_ITERS="${LR_WARMUP_ITERS:-100}"
LR_DECAY_STYLE="${LR_DECAY_STYLE:-cosine}"
WEIGHT_DECAY="${WEIGHT_DECAY:-0.1}"
CLIP_GRAD="${CLIP_GRAD:-1.0}"
INDEXER_LR="${INDEXER_LR-1e-3}" # set but empty: LR; the published warm-up rate
INDEXER_WARMUP_ITERS="${INDEXER_WARMUP_ITERS:-200}" # dense attention while the indexer learns what it looks at
INDEXER_LOSS_COEFF="${INDEXER_LOSS_COEFF:-1.0}"
MOE_AUX_LOSS_COEFF="${MOE_AUX_LOSS_COEFF:-0.001}" # new layers' routers only
SEED="${SEED:-1234}"
LOG_INTERVAL="${LOG_INTERVAL:-10}"
EVAL_INTERVAL="${EVAL_INTERVAL:-100}"
EVAL_ITERS="${EVAL_ITERS:-10}"
SAVE_INTERVAL="${SAVE_INTERVAL:-200}"
KEEP_LAST="${KEEP_LAST:-2}"
ASYNC_SAVE="${ASYNC_SAVE:-0}" # 1: write checkpoints while training goes on, from a copy in host memory
WANDB_PROJECT="${WANDB_PROJECT:-}"
TRUNK_CACHE="${TRUNK_CACHE:-}" # a directory for this base and this text: later epochs and runs skip the frozen layers; 4 KB a token

model_flags
read -r -a data <<< "$DATA_PATH"
FLAGS+=(--data-path "${data[@]}")
if [[ -n "$VALID_DATA_PATH" ]]; then
  read -r -a data <<< "$VALID_DATA_PATH"
  FLAGS+=(--valid-data-path "${data[@]}")
else
  FLAGS+=(--split "$SPLIT")
fi
if resuming; then FLAGS+=(--load "$SAVE"); fi

launch pretrain_upcycle.py "${FLAGS[@]}" "$@"
