# Sourced by examples/ascend_a2/env.sh and examples/ascend_a3/env.sh: what every Ascend node needs. The steps themselves are those of
# examples/deepseek_v2_lite, which read the same variables; here they get the device, the layout and the plan.
# shellcheck shell=bash

ASCEND_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
STEPS="$ASCEND_ROOT/examples/deepseek_v2_lite"
# shellcheck source=deepseek_v2_lite/common.sh
source "$STEPS/common.sh"

# CANN's own variables; skipped where the file is not (a container has them set).
CANN_SET_ENV="${CANN_SET_ENV:-/usr/local/Ascend/ascend-toolkit/set_env.sh}"
load_cann() {
  [[ "$DRY_RUN" == 1 || ! -f "$CANN_SET_ENV" ]] && return
  set +u # it reads variables that may be unset
  # shellcheck disable=SC1090
  source "$CANN_SET_ENV"
  set -u
}

# Communication. Loading and writing take minutes on one rank while the others wait.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-3600}" # seconds that ranks wait for each other at the start
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-3600}"       # seconds that a collective waits for the slowest rank
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}" # megatron-core's order of communication and computation
# Memory and queues.
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}" # less fragmentation
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-2}"                                  # operators are queued from another thread
export STREAMS_PER_DEVICE="${STREAMS_PER_DEVICE:-32}"                               # streams that torch_npu may open
# Nothing leaves the machine; upload later with `wandb sync`.
export WANDB_MODE="${WANDB_MODE:-offline}"

# Equal sums in every run: slower.
DETERMINISTIC="${DETERMINISTIC:-0}"
if [[ "$DETERMINISTIC" != 0 ]]; then
  export HCCL_DETERMINISTIC="${HCCL_DETERMINISTIC:-True}" CLOSE_MATMUL_K_SHIFT="${CLOSE_MATMUL_K_SHIFT:-1}"
  export PYTHONHASHSEED="${PYTHONHASHSEED:-1234}"
fi

# check_settings: numbers and switches, before torchrun or the shell says something else about them, or takes `no` for yes.
check_settings() {
  local name
  for name in DETERMINISTIC RECOMPUTE_DSA DISTRIBUTED_OPTIMIZER BF16; do
    [[ "${!name}" == [01] ]] || fail "$name must be 0 or 1: ${!name}; 1 switches it on"
  done
  for name in NPROC NNODES TENSOR_PARALLEL PIPELINE_PARALLEL EXPERT_PARALLEL SEQ_LENGTH MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE; do
    [[ "${!name}" =~ ^[1-9][0-9]{0,8}$ ]] || fail "$name must be a whole number above 0: ${!name}; unset it for its default"
  done
  if [[ ! "$NODE_RANK" =~ ^[0-9]{1,6}$ ]] || ((10#$NODE_RANK >= NNODES)); then
    fail "NODE_RANK counts the nodes from 0: $NODE_RANK of $NNODES; give each node its own"
  fi
}

# several_nodes: what more than one node needs, before a process waits in vain for the others.
several_nodes() {
  [[ "$NNODES" == 1 ]] && return
  need HCCL_SOCKET_IFNAME "the network interface over which the nodes reach each other (ip addr)"
  export HCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$HCCL_SOCKET_IFNAME}"
  [[ "$MASTER_ADDR" != 127.0.0.1 ]] || fail "MASTER_ADDR is 127.0.0.1 and there are $NNODES nodes: give the first node's address"
}

# layout_flags: the layout, as the training programs and `dsa-upcycle plan` take it, into the array LAYOUT.
layout_flags() {
  LAYOUT=(
    --tensor-model-parallel-size "$TENSOR_PARALLEL" --pipeline-model-parallel-size "$PIPELINE_PARALLEL"
    --expert-model-parallel-size "$EXPERT_PARALLEL"
  )
  [[ "$DISTRIBUTED_OPTIMIZER" == 0 ]] || LAYOUT+=(--use-distributed-optimizer)
}

# plan_flags: the rest of what decides about the plan, into the array PLAN.
plan_flags() {
  PLAN=(--global-batch-size "$GLOBAL_BATCH_SIZE")
  [[ "$RECOMPUTE_DSA" == 0 ]] || PLAN+=(--recompute-dsa)
  [[ "$BF16" == 1 ]] || PLAN+=(--no-bf16)
}

# show_plan: parameters and bytes per device of what would run; on standard error, so that standard output is the command alone.
show_plan() {
  plan_flags
  "$(tool dsa-upcycle)" plan --base "$BASE_MODEL" --dsa-layers "$DSA_LAYERS" --index-topk "$INDEX_TOPK" \
    --index-n-heads "$INDEX_N_HEADS" --index-head-dim "$INDEX_HEAD_DIM" --seq-length "$SEQ_LENGTH" \
    --micro-batch-size "$MICRO_BATCH_SIZE" --devices "$((NNODES * NPROC))" --device-memory-gb "$DEVICE_MEMORY_GB" "${LAYOUT[@]}" "${PLAN[@]}" >&2 ||
    echo "no plan of $BASE_MODEL: the line above says why" >&2
}

# train STEP FLAGS...: pretrain or sft of examples/deepseek_v2_lite with the layout; with DRY_RUN=1 the plan comes first.
train() {
  local step=$1 more=()
  shift
  check_settings
  load_cann
  several_nodes
  layout_flags
  [[ "$DETERMINISTIC" == 0 ]] || more+=(--deterministic)
  [[ "$RECOMPUTE_DSA" == 0 ]] || more+=(--recompute-dsa)
  [[ -z "$PEAK_TFLOPS" ]] || more+=(--peak-tflops "$PEAK_TFLOPS")
  if [[ "$DRY_RUN" == 1 && -n "${BASE_MODEL:-}" ]]; then show_plan; fi
  export_settings
  exec bash "$STEPS/$step.sh" "${LAYOUT[@]}" --distributed-timeout-minutes "$TIMEOUT_MINUTES" "${more[@]}" "$@"
}

# step STEP FLAGS...: export or evaluate.
step() {
  load_cann
  export_settings
  exec bash "$STEPS/$1.sh" "${@:2}"
}

# What the steps read. A variable that is not set here keeps the step's own default.
export_settings() {
  export DRY_RUN NPROC NNODES NODE_RANK MASTER_ADDR MASTER_PORT DEVICE LOG_DIR DSA_LAYERS DSA_INIT DSA_BACKEND BF16
  export INDEX_TOPK INDEX_N_HEADS INDEX_HEAD_DIM SEQ_LENGTH MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE WANDB_PROJECT
}

# files_of WORDS: into the array FILES, what one pattern stands for (its folder may have spaces), else each word's files.
files_of() {
  local IFS=
  # shellcheck disable=SC2206  # the patterns are meant to become their files
  FILES=($1)
  [[ -e "${FILES[0]}" ]] && return
  IFS=$' \t\n'
  # shellcheck disable=SC2206
  FILES=($1)
}

# prepare_data: TEXT and CHATS to tokens, as data.sh says.
prepare_data() {
  local python FILES
  need BASE_MODEL "the Hugging Face directory of the base, whose tokenizer is used"
  [[ -n "$TEXT$CHATS" ]] || fail "TEXT and CHATS are not set: give files of text, of chats, or both"
  python="$(tool python)"
  if [[ -n "$TEXT" ]]; then
    files_of "$TEXT"
    run_or_print "$python" "$ROOT/data/prepare_pretrain.py" --input "${FILES[@]}" --text-key "$TEXT_KEY" --tokenizer "$BASE_MODEL" \
      --output-prefix "$TEXT_PREFIX" --workers "$WORKERS"
  fi
  if [[ -n "$CHATS" ]]; then
    files_of "$CHATS"
    run_or_print "$python" "$ROOT/data/prepare_sft.py" --input "${FILES[@]}" --tokenizer "$BASE_MODEL" --seq-length "$SEQ_LENGTH" \
      --output "$CHATS_FOLDER" --workers "$WORKERS"
  fi
}
