#!/usr/bin/env bash
set -xeuo pipefail

python3 -m verl.trainer.main_generation_server \
    data.train_files="['$HOME/data/test.parquet']" \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.n=4 \
    "$@"
