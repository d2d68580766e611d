# Sourced by the scripts of this folder: where to run, which model, and how to launch. Every setting is an environment
# variable with its default here or at the top of a script; flags after the script's name go to the Python command as they
# are. DRY_RUN=1 prints the command instead of running it.
# shellcheck shell=bash disable=SC2034  # the scripts read these variables

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=../signals.sh
source "$ROOT/examples/signals.sh"

# Where: processes on this machine (one per device), machines, and how they find each other.
NPROC="${NPROC:-1}"
NNODES="${NNODES:-1}"
MAX_RESTARTS="${MAX_RESTARTS:-0}" # times that torchrun starts the run again after a failure, from its last checkpoint
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
MASTER_PORT="${MASTER_PORT:-29500}"
DEVICE="${DEVICE:-}" # cpu, cuda or npu; empty: what is there
LOG_DIR="${LOG_DIR:-}" # one file a rank below it, and rank 0 on the console; empty: all ranks on the console
DRY_RUN="${DRY_RUN:-0}"

# The model: two DSA layers on top; the indexer has the sizes that inference kernels want.
DSA_LAYERS="${DSA_LAYERS:-2}"
DSA_INIT="${DSA_INIT:-identity}"
INDEX_TOPK="${INDEX_TOPK:-2048}"
INDEX_N_HEADS="${INDEX_N_HEADS:-64}"
INDEX_HEAD_DIM="${INDEX_HEAD_DIM:-128}"
DSA_BACKEND="${DSA_BACKEND:-auto}"
BF16="${BF16:-1}"

# Offline unless you say otherwise: everything is read from local directories.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

fail() {
  echo "error: $1" >&2
  exit 2
}

# Anything else would start the run that was only to be looked at.
[[ "$DRY_RUN" == [01] ]] || fail "DRY_RUN must be 0 or 1: $DRY_RUN; 1 prints the command instead of running it"

# The lines of a script's head comment.
help_text() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1"; }

# help_if_asked SCRIPT FLAGS...: print the script's head for --help.
help_if_asked() {
  if [[ "${2:-}" == -h || "${2:-}" == --help ]]; then
    help_text "$1"
    exit 0
  fi
}

# need NAME WHAT: stop unless the variable is set.
need() { [[ -n "${!1:-}" ]] || fail "$1 is not set: it is $2; e.g. $1=... bash $0"; }

# tool NAME: the command, from PATH or else from the repository's .venv.
tool() {
  if command -v "$1" > /dev/null; then
    command -v "$1"
  elif [[ -x "$ROOT/.venv/bin/$1" ]]; then
    echo "$ROOT/.venv/bin/$1"
  else
    fail "$1 is not there: activate the environment that has it, or make one with bash examples/setup_env.sh"
  fi
}

# run_or_print COMMAND...: the one place that DRY_RUN reaches.
run_or_print() {
  if [[ "$DRY_RUN" == 1 ]]; then
    printf '%q ' "$@"
    echo
  else
    attend command "$@"
  fi
}

# model_flags: the flags that pretraining and SFT share, into the array FLAGS.
model_flags() {
  FLAGS=(
    --base-model "$BASE_MODEL" --dsa-layers "$DSA_LAYERS" --dsa-init "$DSA_INIT"
    --index-topk "$INDEX_TOPK" --index-n-heads "$INDEX_N_HEADS" --index-head-dim "$INDEX_HEAD_DIM"
    --dsa-backend "$DSA_BACKEND" --seq-length "$SEQ_LENGTH"
    --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE" --train-iters "$TRAIN_ITERS"
    --optimizer "$OPTIMIZER" --lr "$LR" --min-lr "$MIN_LR" --lr-warmup-iters "$LR_WARMUP_ITERS" --lr-decay-style "$LR_DECAY_STYLE"
    --weight-decay "$WEIGHT_DECAY" --clip-grad "$CLIP_GRAD"
    --indexer-warmup-iters "$INDEXER_WARMUP_ITERS" --indexer-loss-coeff "$INDEXER_LOSS_COEFF"
    --moe-aux-loss-coeff "$MOE_AUX_LOSS_COEFF"
    --seed "$SEED" --log-interval "$LOG_INTERVAL" --eval-interval "$EVAL_INTERVAL" --eval-iters "$EVAL_ITERS"
    --save "$SAVE" --save-interval "$SAVE_INTERVAL" --keep-last "$KEEP_LAST" --tensorboard-dir "$SAVE/tensorboard"
  )
  [[ "$BF16" == 0 ]] || FLAGS+=(--bf16)
  [[ "$ASYNC_SAVE" == 0 ]] || FLAGS+=(--async-save)
  [[ -z "$INDEXER_LR" ]] || FLAGS+=(--indexer-lr "$INDEXER_LR")
  [[ -z "$DEVICE" ]] || FLAGS+=(--device "$DEVICE")
  [[ -z "$TRUNK_CACHE" ]] || FLAGS+=(--trunk-cache "$TRUNK_CACHE")
  [[ -z "$WANDB_PROJECT" ]] || FLAGS+=(--wandb-project "$WANDB_PROJECT")
}

# A run that was stopped goes on where it stands.
resuming() { [[ -f "$SAVE/latest_checkpointed_iteration.txt" ]] || compgen -G "$SAVE/iter_[0-9]*" > /dev/null; }

# launch SCRIPT FLAGS...: torchrun on this machine, or on each of NNODES machines. Signals go to the program, which saves and
# ends with 0. After a failure torchrun ends with 1 whatever the exit code of the program was, after a long report.
launch() {
  local torchrun where=(--standalone) command
  torchrun="$(tool torchrun)"
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="$((NNODES > 1))" # else a second start finds the addresses of the first
  [[ "$NNODES" == 1 ]] || where=(
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
  )
  [[ -z "$LOG_DIR" ]] || where+=(--log-dir "$LOG_DIR" --redirects 3 --tee "0:3")
  command=("$torchrun" "${where[@]}" --nproc-per-node "$NPROC" --max-restarts "$MAX_RESTARTS" "$ROOT/$1" "${@:2}")
  if [[ "$DRY_RUN" == 1 ]]; then
    run_or_print "${command[@]}"
    return
  fi
  attend workers "${command[@]}" && return
  echo "error: $1 stopped; its reason is the line starting with 'error:' (or the traceback) above torchrun's report" >&2
  [[ -z "$LOG_DIR" ]] || echo "error: or it is in the stderr.log of another rank, below $LOG_DIR" >&2
  exit 1
}
