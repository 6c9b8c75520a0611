#!/usr/bin/env bash
# Asynchronous GRPO with off-policy corrections, in verl's mode separate_async: rollouts run on separate GPUs, and
# continue while the trainer (FSDP2) makes SYNC_STEPS updates. Requires verl 0.9.1.
# Arguments are Hydra overrides. With --check among them, the script runs the start-up checks and exits; with --cfg job
# at the end, it prints the composed config.
#
#   MODEL_PATH      Hugging Face model (default Qwen/Qwen3-8B)
#   TRAIN_FILE, VAL_FILE   parquet files of prompts (default ~/data/train.parquet, ~/data/val.parquet)
#   MAX_PROMPT_LENGTH, MAX_RESPONSE_LENGTH   in tokens (default 2048 and 8192)
#   NNODES, GPUS_PER_NODE  of the trainer (default 1 and 8)
#   ROLLOUT_NNODES, ROLLOUT_GPUS_PER_NODE   of the rollouts (default 1 and 8)
#   ROLLOUT_TP      GPUs that share one rollout engine (default 2)
#   SYNC_STEPS      updates between two synchronisations of the weights (default 4)
#   MAX_STALENESS   maximum age of a sequence, in weight versions; older sequences are dropped (default 8)
#   TRANSPORT       verl's checkpoint engine that sends the weights: nccl, nixl ... (default nccl)
#   CORRECTION      options, separated by commas (default opsm, with correction.masks.opsm.delta=0.1)
#
# On a Ray cluster, from the project: bash scripts/launch_ray.sh ROLLOUT_NNODES=2 recipe/offpolicy/run_async.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
NNODES=${NNODES:-1}
ROLLOUT_NNODES=${ROLLOUT_NNODES:-1}
ROLLOUT_GPUS_PER_NODE=${ROLLOUT_GPUS_PER_NODE:-8}
ROLLOUT_TP=${ROLLOUT_TP:-2}
SYNC_STEPS=${SYNC_STEPS:-4}
MAX_STALENESS=${MAX_STALENESS:-8}
TRANSPORT=${TRANSPORT:-nccl}
if [[ -z ${CORRECTION:-} && " $* " != *" correction="* ]]; then
    set -- correction.masks.opsm.delta=0.1 "$@"
fi
CORRECTION=${CORRECTION:-opsm}
NAME=async
TRAIN_BATCH=$((SYNC_STEPS * 64)) # verl demands one mini-batch for each update between two synchronisations
SEQUENCES=2
GPU_MEMORY=0.85 # these GPUs hold nothing of the trainer
source "$root/recipe/offpolicy/run_common.sh"

if ! grep -q '^ *separate_async:' "$verl/trainer/config/ppo_trainer.yaml"; then
    echo "run_async.sh: verl $(< "$verl/version/version") has no trainer.v1.separate_async, which came with 0.9.1." \
        "Fix: install verl 0.9.1, use fully_async_policy (docs/programs/fully_async.md), or take run_dense_fsdp.sh," \
        "whose rollouts wait for the trainer." >&2
    exit 1
fi

exec python3 -m recipe.offpolicy.main_offpolicy "${COMMON[@]}" \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.hybrid_engine=false \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.rollout.nnodes="$ROLLOUT_NNODES" \
    actor_rollout_ref.rollout.n_gpus_per_node="$ROLLOUT_GPUS_PER_NODE" \
    actor_rollout_ref.rollout.checkpoint_engine.backend="$TRANSPORT" \
    trainer.use_v1=true \
    trainer.v1.trainer_mode=separate_async \
    trainer.v1.separate_async.parameter_sync_step="$SYNC_STEPS" \
    trainer.v1.separate_async.num_warmup_batches=1 \
    trainer.v1.sampler.max_off_policy_threshold="$MAX_STALENESS" \
    trainer.v1.sampler.max_off_policy_strategy=drop \
    "$@"
