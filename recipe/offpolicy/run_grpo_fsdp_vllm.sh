#!/usr/bin/env bash
# GRPO with off-policy corrections on one node, FSDP trainer and vLLM rollouts. Arguments are Hydra overrides;
# --check among them runs the start-up checks and exits.
#
#   MODEL=... TRAIN=train.parquet VAL=val.parquet bash recipe/offpolicy/run_grpo_fsdp_vllm.sh [overrides]
#   GPUS           on this node (default 8)
#   CORRECTION     one option or several (default tis_token; 'tis_token,gsm')
set -euo pipefail

: "${MODEL:?a Hugging Face model}" "${TRAIN:?a parquet file of prompts}" "${VAL:?a parquet file of prompts}"
GPUS=${GPUS:-8}
CORRECTION=${CORRECTION:-tis_token}

overrides=(
    "correction=[${CORRECTION}]"
    algorithm.adv_estimator=grpo

    data.train_files="$TRAIN"
    data.val_files="$VAL"
    data.train_batch_size=256
    data.max_prompt_length=1024
    data.max_response_length=4096

    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.actor.optim.lr=1e-6
    # Four gradient steps a batch: the last ones are off policy, which the full ratio sees.
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384

    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1

    trainer.n_gpus_per_node="$GPUS"
    trainer.nnodes=1
    trainer.logger='[console]'
    trainer.total_epochs=1
)
exec python -m recipe.offpolicy.main_offpolicy "${overrides[@]}" "$@"
