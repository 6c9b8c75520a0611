#!/usr/bin/env bash
set -xeuo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-30B-A3B}
max_response_length=$((1024 * 8))
max_tokens=$((1024 * 2 + max_response_length))

DATA=(
    data.train_files="$HOME/data/train.parquet"
    data.val_files="['$HOME/data/aime.parquet','$HOME/data/math.parquet']"
    data.max_response_length=$max_response_length
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$max_tokens
    # Flags of one kind of device.
    actor_rollout_ref.actor.strategy=fsdp2
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=16
)
if [ "${OFFLOAD:-0}" = 1 ]; then
    ACTOR+=(actor_rollout_ref.actor.fsdp_config.param_offload=True)
fi

python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "$@"
