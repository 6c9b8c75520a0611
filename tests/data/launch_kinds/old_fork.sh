#!/usr/bin/env bash
set -xeuo pipefail

python3 -m verl.trainer.main_ppo \
    data.train_files="$HOME/data/train.parquet" \
    data.val_files="$HOME/data/test.parquet" \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.name=vllm \
    algorithm.adv_estimator=grpo \
    data.max_start_length=2048 \
    data.max_obs_length=500 \
    actor_rollout_ref.rollout.n_agent=5 \
    actor_rollout_ref.actor.state_masking=true \
    +trainer.val_only=false \
    max_turns=2 \
    retriever.url=http://127.0.0.1:8000/retrieve \
    retriever.topk=3 \
    "$@"
