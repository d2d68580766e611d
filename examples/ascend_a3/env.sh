# Sourced by the scripts of this folder: DeepSeek-V2-Lite(-Chat) on Atlas A3 nodes (16 dies of 64 GB), TP1 PP1 EP8.
# Every setting is an environment variable with its default here. The steps' own (rates, steps, intervals, paths) stand at the top of
# examples/deepseek_v2_lite/pretrain.sh, sft.sh, export.sh and evaluate.sh, which these scripts call. DRY_RUN=1 prints the plan and the
# command. Written from public launch scripts and documents: NOT run on an NPU.
# shellcheck shell=bash disable=SC2034  # ascend.sh and the steps read these variables

# Where: devices of a node, nodes, and how they find each other. Two nodes: NNODES=2 MASTER_ADDR=<first> HCCL_SOCKET_IFNAME=<interface>
# on both, NODE_RANK=0 on the first and 1 on the second.
NPROC="${NPROC:-16}"                   # one process a die
NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
DEVICE="${DEVICE:-npu}"
DEVICE_MEMORY_GB="${DEVICE_MEMORY_GB:-64}" # for the plan
PEAK_TFLOPS="${PEAK_TFLOPS:-}"          # one device's bf16 peak by its data sheet; the log then shows the share that is reached
LOG_DIR="${LOG_DIR:-runs/v2_lite/logs}" # one file a rank; rank 0 also on the console
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}" # threads stay near their device

# Layout: the experts of a layer over 8 devices, everything else whole on each; data parallel over all devices.
TENSOR_PARALLEL="${TENSOR_PARALLEL:-1}"
PIPELINE_PARALLEL="${PIPELINE_PARALLEL:-1}"     # one stage: only the last would train, and the others wait
EXPERT_PARALLEL="${EXPERT_PARALLEL:-8}"         # two groups a node, which hold the same experts
DISTRIBUTED_OPTIMIZER="${DISTRIBUTED_OPTIMIZER:-1}" # Adam's state over the devices that hold the same parameters
TIMEOUT_MINUTES="${TIMEOUT_MINUTES:-60}"        # that a rank waits for the others before it ends

# Model and batch.
SEQ_LENGTH="${SEQ_LENGTH:-4096}"
MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}" # a multiple of the devices
RECOMPUTE_DSA="${RECOMPUTE_DSA:-0}"          # 1: less memory, more time
DSA_BACKEND="${DSA_BACKEND:-auto}"           # npu, the fused operators; chunked is plain torch, to compare with
WANDB_PROJECT="${WANDB_PROJECT-dsa_upcycling}" # offline; empty: none

# shellcheck source=../ascend.sh
source "$(dirname "${BASH_SOURCE[0]}")/../ascend.sh"
