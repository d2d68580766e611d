#!/usr/bin/env bash
# Supervised fine-tuning of the DSA layers on chats, from the weights of pretraining. The base stays frozen.
#
#   BASE_MODEL=/models/DeepSeek-V2-Lite-Chat DATA_PATH=runs/v2_lite/chats bash examples/deepseek_v2_lite/sft.sh
#
# DATA_PATH is the folder that data/prepare_sft.py wrote; PRETRAINED the SAVE of pretrain.sh. A run that was stopped resumes
# from SAVE. Every variable below is a setting; more flags can follow: sft.sh --deterministic
# DRY_RUN=1 prints the command.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"

need BASE_MODEL "the Hugging Face directory of the base"
need DATA_PATH "the folder that data/prepare_sft.py wrote"
PRETRAINED="${PRETRAINED:-runs/v2_lite/pretrain}"
VALID_DATA_PATH="${VALID_DATA_PATH:-}" # empty: SPLIT holds a part of DATA_PATH out
SPLIT="${SPLIT:-98,2}"
SAVE="${SAVE:-runs/v2_lite/sft}"

SEQ_LENGTH="${SEQ_LENGTH:-4096}"
MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}"
TRAIN_ITERS="${TRAIN_ITERS:-1000}"
OPTIMIZER="${OPTIMIZER:-adam}" # adam, sgd or muon
LR="${LR:-2e-5}"
MIN_LR="${MIN_LR:-2e-6}"
LR_WARMUP_ITERS="${LR_WARMUP_ITERS:-50}"
LR_DECAY_STYLE="${LR_DECAY_STYLE:-cosine}"
WEIGHT_DECAY="${WEIGHT_DECAY:-0.1}"
CLIP_GRAD="${CLIP_GRAD:-1.0}"
INDEXER_LR="${INDEXER_LR:-}" # empty: LR
INDEXER_WARMUP_ITERS="${INDEXER_WARMUP_ITERS:-0}" # the indexer comes from pretraining
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
TRUNK_CACHE="${TRUNK_CACHE:-}" # a directory for this base and these chats: later epochs and runs skip the frozen layers; 4 KB a token

model_flags
FLAGS+=(--data-path "$DATA_PATH")
if [[ -n "$VALID_DATA_PATH" ]]; then
  FLAGS+=(--valid-data-path "$VALID_DATA_PATH")
else
  FLAGS+=(--split "$SPLIT")
fi
if resuming; then
  FLAGS+=(--load "$SAVE")
else
  FLAGS+=(--pretrained-checkpoint "$PRETRAINED")
fi

launch sft_upcycle.py "${FLAGS[@]}" "$@"
