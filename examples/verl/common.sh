# Sourced by the scripts of this folder: what they share of a GRPO run with verl 0.9.1. Every setting is an environment variable
# with its default here or at the top of a script; words after the script's name go to verl as Hydra overrides, and win.
# DRY_RUN=1 prints the command, and verl's whole configuration where verl is importable, instead of running it.
# shellcheck shell=bash

# shellcheck source=../deepseek_v2_lite/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../deepseek_v2_lite/common.sh"

PYTHON="${PYTHON:-python}" # verl's Python: not this repository's .venv

MODEL="${MODEL:-}" # the directory that trainer and engine share
DATA="${DATA:-}"   # what data/prepare_rl.py wrote

# What a script gives unless it, or you, set something else.
DEVICE="${DEVICE:-cuda}"                       # cuda or npu
[[ "$DEVICE" != npu ]] || DEVICES_PER_NODE="${DEVICES_PER_NODE:-16}" # dies of an Atlas A3
DEVICES_PER_NODE="${DEVICES_PER_NODE:-8}"      # GPUs
ROLLOUT="${ROLLOUT:-vllm}"                     # vllm, vllm-ascend (DEVICE=npu) or sglang
PROMPT_LENGTH="${PROMPT_LENGTH:-512}"          # longer prompts are left out
RESPONSE_LENGTH="${RESPONSE_LENGTH:-1024}"     # with the prompt at most index_topk while the base's indexers are neutral
TRAIN_BATCH_SIZE="${TRAIN_BATCH_SIZE:-64}"     # questions a step
MINI_BATCH_SIZE="${MINI_BATCH_SIZE:-64}"       # questions an update; fewer than TRAIN_BATCH_SIZE: several, off-policy
GROUP_SIZE="${GROUP_SIZE:-8}"                  # responses a question: what GRPO compares
TOKENS_PER_DEVICE="${TOKENS_PER_DEVICE:-8192}" # of a forward pass; its attention mask has their square
LR="${LR:-1e-6}"
LR_WARMUP_STEPS="${LR_WARMUP_STEPS:-5}"
WEIGHT_DECAY="${WEIGHT_DECAY:-0.01}"
CLIP_GRAD="${CLIP_GRAD:-1.0}"
CLIP_LOW="${CLIP_LOW:-0.2}" # of the probability ratio
CLIP_HIGH="${CLIP_HIGH:-0.28}"
KL_LOSS_COEF="${KL_LOSS_COEF:-0}" # 0: no reference model is held
ENTROPY_COEF="${ENTROPY_COEF:-0}"
TEMPERATURE="${TEMPERATURE:-1.0}"      # 1.0: else trainer and engine differ by more than numerics
ROLLOUT_TP="${ROLLOUT_TP:-1}"          # must divide the attention heads
ROLLOUT_DP="${ROLLOUT_DP:-1}"          # data-parallel ranks inside one engine
ROLLOUT_EP="${ROLLOUT_EP:-1}"          # 1, or ROLLOUT_TP * ROLLOUT_DP: experts spread over the engine
MEMORY_SHARE="${MEMORY_SHARE:-0.5}"    # of a device, for the engine's weights and cache
ENFORCE_EAGER="${ENFORCE_EAGER:-1}"    # 1: no graph capture, slower and one thing less to suspect
OFFLOAD="${OFFLOAD:-0}"                # 1: weights and optimizer wait on the host while the engine works
ROUTER_REPLAY="${ROUTER_REPLAY:-disabled}" # R2: the trainer replays its own routes; R3: the engine's. TRAINER=megatron
TP="${TP:-1}" PP="${PP:-1}" EP="${EP:-1}" ETP="${ETP:-1}" CP="${CP:-1}" # TRAINER=megatron
FIRST_STAGE_LAYERS="${FIRST_STAGE_LAYERS:-}" # with PP, where the layers do not divide; empty: they do
BRIDGE_LIB="${BRIDGE_LIB:-}"           # TRAINER=megatron: the module that registers the architecture's bridge
TOTAL_STEPS="${TOTAL_STEPS:-200}"
SAVE_INTERVAL="${SAVE_INTERVAL:-50}"
TEST_INTERVAL="${TEST_INTERVAL:-10}"
SEED="${SEED:-1234}"
LOGGER="${LOGGER:-console,file}" # also tensorboard, wandb; dsa-upcycle rl-report reads all four
OUTPUT="${OUTPUT:-runs/grpo}"

on() { if [[ "$1" == 1 ]]; then echo True; else echo False; fi; }

# grpo_overrides: verl's settings, into the array OVERRIDES.
grpo_overrides() {
  local actor=actor_rollout_ref.actor rollout=actor_rollout_ref.rollout
  OVERRIDES=(
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
    "data.train_files=$DATA/train.parquet" "data.val_files=$DATA/validation.parquet" "data.seed=$SEED"
    "data.train_batch_size=$TRAIN_BATCH_SIZE" "data.max_prompt_length=$PROMPT_LENGTH" "data.max_response_length=$RESPONSE_LENGTH"
    data.filter_overlong_prompts=True data.truncation=error
    "reward.custom_reward_function.path=pkg://megatron_patch.verl.rewards" reward.custom_reward_function.name=compute_score
    "actor_rollout_ref.model.path=$MODEL" actor_rollout_ref.model.enable_gradient_checkpointing=True
    "$actor.ppo_mini_batch_size=$MINI_BATCH_SIZE" "$actor.ppo_epochs=1" "$actor.use_torch_compile=False"
    "$actor.use_dynamic_bsz=True" "$actor.ppo_max_token_len_per_gpu=$TOKENS_PER_DEVICE"
    "$actor.optim.lr=$LR" "$actor.optim.lr_warmup_steps=$LR_WARMUP_STEPS" "$actor.optim.weight_decay=$WEIGHT_DECAY"
    "$actor.optim.clip_grad=$CLIP_GRAD" "$actor.clip_ratio_low=$CLIP_LOW" "$actor.clip_ratio_high=$CLIP_HIGH"
    "$actor.loss_agg_mode=token-mean" "$actor.entropy_coeff=$ENTROPY_COEF" "$actor.calculate_entropy=True"
    "$rollout.name=${ROLLOUT%-ascend}" "$rollout.n=$GROUP_SIZE" "$rollout.temperature=$TEMPERATURE" "$rollout.seed=$SEED"
    "$rollout.top_p=1.0" "$rollout.top_k=-1" "$rollout.dtype=bfloat16" "$rollout.calculate_log_probs=True"
    "$rollout.tensor_model_parallel_size=$ROLLOUT_TP" "$rollout.data_parallel_size=$ROLLOUT_DP"
    "$rollout.expert_parallel_size=$ROLLOUT_EP" "$rollout.gpu_memory_utilization=$MEMORY_SHARE"
    "$rollout.max_model_len=$((PROMPT_LENGTH + RESPONSE_LENGTH))" "$rollout.enforce_eager=$(on "$ENFORCE_EAGER")"
    "trainer.device=$DEVICE" "trainer.nnodes=$NNODES" "trainer.n_gpus_per_node=$DEVICES_PER_NODE"
    "trainer.total_training_steps=$TOTAL_STEPS" "trainer.save_freq=$SAVE_INTERVAL" "trainer.test_freq=$TEST_INTERVAL"
    "trainer.logger=[$LOGGER]" "trainer.project_name=upcycle" "trainer.experiment_name=$(basename "$OUTPUT")"
    "trainer.default_local_dir=$OUTPUT/checkpoints" "trainer.rollout_data_dir=$OUTPUT/rollouts"
    "+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH=$ROOT" # workers import the reward and external_lib from here
  )
  if [[ "$KL_LOSS_COEF" == 0 ]]; then
    OVERRIDES+=("$actor.use_kl_loss=False")
  else
    OVERRIDES+=("$actor.use_kl_loss=True" "$actor.kl_loss_coef=$KL_LOSS_COEF")
  fi
  case "$TRAINER" in
    fsdp | fsdp2) fsdp_overrides ;;
    megatron) megatron_overrides ;;
    *) fail "TRAINER must be fsdp, fsdp2 or megatron: $TRAINER; choose one" ;;
  esac
}

# The trainer on transformers' side: our class, from the release's own code and not from the directory.
fsdp_overrides() {
  local role
  OVERRIDES+=(
    model_engine=dp "actor_rollout_ref.actor.strategy=$TRAINER"
    actor_rollout_ref.model.external_lib=megatron_patch.verl.external actor_rollout_ref.model.trust_remote_code=False
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa # flash attention knows no selection of keys
    actor_rollout_ref.model.use_remove_padding=True
  )
  for role in actor ref; do
    OVERRIDES+=(
      # frozen indexers beside weights that train: FSDP1's flat parameters take both only so
      "actor_rollout_ref.$role.fsdp_config.use_orig_params=True"
      "actor_rollout_ref.$role.fsdp_config.param_offload=$(on "$OFFLOAD")"
    )
  done
  OVERRIDES+=("actor_rollout_ref.actor.fsdp_config.optimizer_offload=$(on "$OFFLOAD")")
}

# The trainer on Megatron's side, MindSpeed on NPUs.
megatron_overrides() {
  local megatron=actor_rollout_ref.actor.megatron
  OVERRIDES+=(
    model_engine=megatron actor_rollout_ref.model.use_remove_padding=False "$megatron.use_remove_padding=False"
    "$megatron.tensor_model_parallel_size=$TP" "$megatron.pipeline_model_parallel_size=$PP"
    "$megatron.expert_model_parallel_size=$EP" "$megatron.expert_tensor_parallel_size=$ETP"
    "$megatron.context_parallel_size=$CP" "$megatron.use_mbridge=True" "$megatron.vanilla_mbridge=False"
    "$megatron.param_offload=$(on "$OFFLOAD")" "$megatron.optimizer_offload=$(on "$OFFLOAD")"
    "$megatron.router_replay.mode=$ROUTER_REPLAY"
    "$megatron.override_transformer_config.recompute_granularity=full"
    "$megatron.override_transformer_config.recompute_method=uniform"
    "$megatron.override_transformer_config.recompute_num_layers=1"
  )
  [[ -z "$FIRST_STAGE_LAYERS" ]] \
    || OVERRIDES+=("+$megatron.override_transformer_config.num_layers_in_first_pipeline_stage=$FIRST_STAGE_LAYERS")
  [[ -z "$BRIDGE_LIB" ]] || OVERRIDES+=("actor_rollout_ref.model.external_lib=$BRIDGE_LIB")
  [[ "$ROUTER_REPLAY" != R3 ]] || OVERRIDES+=(actor_rollout_ref.rollout.enable_rollout_routing_replay=True)
}

# What collectives on NPUs want; set on every node before `ray start`, see start_ray.sh.
npu_environment() {
  export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-3600}" HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-3600}"
  export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}" CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"
  export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-2}" VLLM_ASCEND_ENABLE_NZ="${VLLM_ASCEND_ENABLE_NZ:-0}" # NZ: reloaded weights would not fit
  export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES="${RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES:-1}"
}

# check_model: what can be known from the directory's small files; a dry run needs no directory.
check_model() {
  [[ "$DRY_RUN" != 1 || -d "$MODEL" ]] || return 0
  local ascend=()
  [[ "$DEVICE" != npu ]] || ascend=(--ascend)
  "$PYTHON" -m megatron_patch.verl.check_launch --model "$MODEL" --trainer "$TRAINER" --rollout "$ROLLOUT" \
    --context $((PROMPT_LENGTH + RESPONSE_LENGTH)) --devices $((NNODES * DEVICES_PER_NODE)) --tensor-parallel "$TP" \
    --pipeline-parallel "$PP" --expert-parallel "$EP" --rollout-tensor-parallel "$ROLLOUT_TP" \
    --router-replay "$ROUTER_REPLAY" --bridge "$BRIDGE_LIB" "${ascend[@]}"
}

# grpo OVERRIDES...: check, then train; on the node where `ray start --head` ran.
grpo() {
  need MODEL "the Hugging Face directory that trainer and engine share"
  need DATA "the folder that data/prepare_rl.py wrote"
  case "$ROLLOUT" in
    vllm | vllm-ascend | sglang) ;;
    *) fail "ROLLOUT must be vllm, vllm-ascend or sglang: $ROLLOUT; choose one" ;;
  esac
  [[ "$ROLLOUT" != vllm-ascend || "$DEVICE" == npu ]] || fail "ROLLOUT=vllm-ascend needs DEVICE=npu: it is $DEVICE; use ROLLOUT=vllm"
  [[ "$DEVICE" != npu || "$ROLLOUT" != vllm ]] || fail "ROLLOUT on NPUs is vllm-ascend or sglang: vllm; use ROLLOUT=vllm-ascend"
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
  [[ "$DEVICE" != npu ]] || npu_environment
  MODEL="$(realpath -m "$MODEL")" DATA="$(realpath -m "$DATA")" OUTPUT="$(realpath -m "$OUTPUT")" # Ray's workers start elsewhere
  check_model
  grpo_overrides
  run_or_print "$PYTHON" -m verl.trainer.main_ppo "${OVERRIDES[@]}" "$@"
  [[ "$DRY_RUN" == 1 ]] || return 0
  if "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("verl") is None)' 2> /dev/null; then
    "$PYTHON" -W ignore -m megatron_patch.verl.compose "${OVERRIDES[@]}" "$@"
  else
    echo "note: verl is not importable by PYTHON=$PYTHON: its configuration was not composed" >&2
  fi
}
