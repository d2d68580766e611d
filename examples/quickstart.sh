#!/usr/bin/env bash
# The whole journey on this machine: a small base is trained from real text, gets two DSA layers, learns from text and from
# chats, leaves as a Hugging Face checkpoint and is scored against its base. The scripts are those of the real job.
#
#   bash examples/quickstart.sh [--fast] [--output DIR]
#
# --fast        a few steps everywhere: proves the path, not the figures
# --output DIR  default: runs/quickstart. A second run reuses what is done there
# DRY_RUN=1 prints the training and evaluation commands; DEVICE=cuda takes a GPU.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
OUTPUT_DIR="runs/quickstart"
MODE=full
STARTED=$SECONDS

fail() {
  echo "error: $1" >&2
  exit 2
}

while (($#)); do
  case "$1" in
    --fast) MODE=fast ;;
    --output)
      [[ -n "${2:-}" ]] || fail "--output needs a directory; e.g. --output runs/quickstart"
      OUTPUT_DIR="$2"
      shift
      ;;
    --output=*) OUTPUT_DIR="${1#*=}" ;;
    -h | --help)
      sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) fail "unknown flag $1; flags: --fast, --output DIR, --help" ;;
  esac
  shift
done

# Sizes of the demo; everything else of the real job stays as it is. Its rates are higher because the model is tiny.
export SEQ_LENGTH=256 INDEX_TOPK=16 INDEX_N_HEADS=4 INDEX_HEAD_DIM=32 DSA_LAYERS=2 DSA_INIT=identity
export MICRO_BATCH_SIZE=8 GLOBAL_BATCH_SIZE=8 NPROC=1 NNODES=1 BF16=0 DTYPE=float32
export WEIGHT_DECAY=0 INDEXER_LR="" MOE_AUX_LOSS_COEFF=0 LOG_INTERVAL=10 KEEP_LAST=1
# Shapes are small: a second thread gains nothing, and on a busy machine threads stall on each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" DEVICE="${DEVICE:-}" DRY_RUN="${DRY_RUN:-0}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# In a log file, progress bars are a line every ten seconds.
[[ -t 2 ]] || export TQDM_MININTERVAL="${TQDM_MININTERVAL:-10}"
# Machines without a home directory: libraries want somewhere to write their caches.
export MPLCONFIGDIR="${MPLCONFIGDIR:-$ROOT/.venv/cache/matplotlib}" HF_HOME="${HF_HOME:-$ROOT/.venv/cache/huggingface}"
PRETRAIN_RECIPE=(OPTIMIZER=muon TRAIN_ITERS=200 LR=2e-3 MIN_LR=1e-4 LR_WARMUP_ITERS=20 INDEXER_WARMUP_ITERS=100
  EVAL_INTERVAL=50 EVAL_ITERS=10 SAVE_INTERVAL=50)
# Short chats, so many a step. The head that finds the needle forms while attention is still dense.
SFT_RECIPE=(OPTIMIZER=muon TRAIN_ITERS=750 LR=4e-3 MIN_LR=3e-4 LR_WARMUP_ITERS=20 INDEXER_WARMUP_ITERS=450
  MICRO_BATCH_SIZE=24 GLOBAL_BATCH_SIZE=24 EVAL_INTERVAL=150 EVAL_ITERS=4 SAVE_INTERVAL=150)
DEMO_FLAGS=() EVALUATE_FLAGS=()
if [[ "$MODE" == fast ]]; then
  PRETRAIN_RECIPE+=(TRAIN_ITERS=6 LR_WARMUP_ITERS=1 INDEXER_WARMUP_ITERS=3 EVAL_INTERVAL=3 EVAL_ITERS=1 LOG_INTERVAL=1)
  SFT_RECIPE+=(TRAIN_ITERS=6 LR_WARMUP_ITERS=1 INDEXER_WARMUP_ITERS=3 EVAL_INTERVAL=3 EVAL_ITERS=1 LOG_INTERVAL=1)
  DEMO_FLAGS=(--fast) EVALUATE_FLAGS=(--limit 20)
fi

bash "$ROOT/examples/setup_env.sh"
export PATH="$ROOT/.venv/bin:$PATH"

mkdir -p "$OUTPUT_DIR"
OUT="$(cd "$OUTPUT_DIR" && pwd)"
STEPS="$ROOT/examples/deepseek_v2_lite"
# shellcheck source=signals.sh
source "$ROOT/examples/signals.sh"
STAGE=0 STAGES=7
if [[ "$(cat "$OUT/mode" 2>/dev/null || echo "$MODE")" != "$MODE" ]]; then
  fail "$OUTPUT_DIR holds a run of the other kind ($(cat "$OUT/mode")): give another --output, or remove the directory"
fi
echo "$MODE" > "$OUT/mode"

# stage NAME MARKER COMMAND...: run the command unless the marker, which it publishes last, is there.
stage() {
  local name=$1 marker=$2 started=$SECONDS
  STAGE=$((STAGE + 1))
  if [[ -e "$marker" ]]; then
    echo "[$STAGE/$STAGES] $name: done before"
    return
  fi
  echo "[$STAGE/$STAGES] $name"
  local status=0
  "${@:3}" || status=$?
  if [[ -n "$SIGNALLED" && ! -e "$marker" ]]; then
    echo "stopped on a signal in stage '$name'; the same command goes on from here" >&2
    exit 143
  fi
  ((status == 0)) || fail "stage '$name' failed; its message is above. The same command goes on from here"
  [[ "$DRY_RUN" == 1 ]] && return
  [[ -e "$marker" ]] || fail "stage '$name' ended without $marker; the same command goes on from here"
  echo "[$STAGE/$STAGES] $name: $((SECONDS - started)) s"
}

# last_checkpoint SAVE SETTINGS...: what the run holds once it has taken all its steps.
last_checkpoint() {
  local setting iterations=0
  for setting in "${@:2}"; do
    [[ "$setting" != TRAIN_ITERS=* ]] || iterations="${setting#*=}"
  done
  printf '%s/iter_%07d/manifest.json' "$1" "$iterations"
}

# train SCRIPT SAVE SETTINGS...: a run that left no checkpoint starts again, one that did goes on.
train() {
  [[ "$DRY_RUN" == 1 ]] || compgen -G "$2/iter_[0-9]*" > /dev/null || rm -rf "$2"
  attend command env BASE_MODEL="$OUT/base" SAVE="$2" "${@:3}" bash "$STEPS/$1"
}

prepare() { if [[ "$DRY_RUN" == 1 ]]; then echo "$@"; else attend command "$@"; fi; }

DEMO="$OUT/base/demo_data"
stage "a small base, trained from text" "$DEMO/suite/suite.json" \
  prepare dsa-upcycle demo-base --output "$OUT/base" "${DEMO_FLAGS[@]}"
stage "text to tokens" "$OUT/data/text.json" \
  prepare python "$ROOT/data/prepare_pretrain.py" --input "$DEMO/pretrain.jsonl" --text-key text --tokenizer "$OUT/base" \
  --output-prefix "$OUT/data/text"
stage "chats to tokens and loss masks" "$OUT/data/chats/meta.json" \
  prepare python "$ROOT/data/prepare_sft.py" --input "$DEMO/sft.jsonl" --tokenizer "$OUT/base" --seq-length "$SEQ_LENGTH" \
  --output "$OUT/data/chats"
stage "upcycle pretraining: only the two new layers learn" "$(last_checkpoint "$OUT/pretrain" "${PRETRAIN_RECIPE[@]}")" \
  train pretrain.sh "$OUT/pretrain" DATA_PATH="$OUT/data/text" "${PRETRAIN_RECIPE[@]}"
stage "supervised fine-tuning on chats" "$(last_checkpoint "$OUT/sft" "${SFT_RECIPE[@]}")" \
  train sft.sh "$OUT/sft" DATA_PATH="$OUT/data/chats" PRETRAINED="$OUT/pretrain" "${SFT_RECIPE[@]}"
stage "Hugging Face export, checked against the base" "$OUT/export/config.json" \
  attend command env BASE_MODEL="$OUT/base" CHECKPOINT="$OUT/sft" OUTPUT="$OUT/export" bash "$STEPS/export.sh"
stage "scores against the base" "$OUT/evaluation/recovery.json" \
  attend command env BASE_MODEL="$OUT/base" MODEL="$OUT/export" SUITE="$DEMO/suite" OUTPUT="$OUT/evaluation" \
  bash "$STEPS/evaluate.sh" "${EVALUATE_FLAGS[@]}"

[[ "$DRY_RUN" == 1 ]] && exit 0
echo
sed '/^## How to read it/,$d' "$OUT/evaluation/recovery.md"
cat << END
base         $OUT/base
pretraining  $OUT/pretrain (metrics.jsonl, loss.png, tensorboard/)
SFT          $OUT/sft
checkpoint   $OUT/export (loads in transformers with trust_remote_code=True)
scores       $OUT/evaluation (recovery.json, recovery.md, recovery.png)
END
if [[ "$MODE" == fast ]]; then
  echo "--fast took a few steps only: the figures above prove the path, nothing about the method."
fi
awk -v s="$((SECONDS - STARTED))" 'BEGIN { printf "total %.1f minutes\n", s / 60 }'
