#!/usr/bin/env bash
# GRPO with truncated importance sampling per token and a geometric sequence mask. Run it from verl's root.
# Set MODEL_PATH, TRAIN_FILE and VAL_FILE; arguments are Hydra overrides.
set -euo pipefail

CORRECTION=${CORRECTION:-'[tis_token,gsm]'}
GPUS=${GPUS:-8}
NODES=${NODES:-1}

overrides=(
    "correction=$CORRECTION"
    "algorithm.adv_estimator=grpo"
    "data.train_files=${TRAIN_FILE:?a parquet file of prompts}"
    "data.val_files=${VAL_FILE:?a parquet file of prompts}"
    "data.train_batch_size=256"
    "data.max_prompt_length=1024"
    "data.max_response_length=8192"
    "actor_rollout_ref.model.path=${MODEL_PATH:?a Hugging Face model}"
    "actor_rollout_ref.actor.ppo_mini_batch_size=64"
    "actor_rollout_ref.actor.use_dynamic_bsz=true"
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384"
    "actor_rollout_ref.actor.optim.lr=1e-6"
    "actor_rollout_ref.rollout.name=vllm"
    "actor_rollout_ref.rollout.n=8"
    "trainer.n_gpus_per_node=$GPUS"
    "trainer.nnodes=$NODES"
    "trainer.logger=[console,wandb]"
    "trainer.experiment_name=offpolicy_correction"
)
python3 -m recipe.offpolicy_correction.main_offpolicy_correction "${overrides[@]}" "$@"
