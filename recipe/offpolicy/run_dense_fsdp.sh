#!/usr/bin/env bash
# GRPO of a dense model with off-policy corrections: FSDP2 trainer, vLLM rollouts on the same GPUs, any supported verl.
# Arguments are Hydra overrides. With --check among them, the script runs the start-up checks and exits; with --cfg job
# at the end, it prints the composed config.
#
#   MODEL_PATH      Hugging Face model (default Qwen/Qwen3-8B)
#   TRAIN_FILE, VAL_FILE   parquet files of prompts (default ~/data/train.parquet, ~/data/val.parquet)
#   MAX_PROMPT_LENGTH, MAX_RESPONSE_LENGTH   in tokens (default 2048 and 8192)
#   NNODES, GPUS_PER_NODE  default 1 and 8
#   ROLLOUT_TP      GPUs that share one rollout engine (default 2)
#   SP              GPUs that share one sequence, Ulysses (default 1)
#   CORRECTION      options, separated by commas (default tis_token,gsm)
#
# On a Ray cluster, from the project: bash scripts/launch_ray.sh NNODES=2 recipe/offpolicy/run_dense_fsdp.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
NNODES=${NNODES:-1}
ROLLOUT_TP=${ROLLOUT_TP:-2}
SP=${SP:-1}
CORRECTION=${CORRECTION:-tis_token,gsm}
NAME=dense_fsdp
TRAIN_BATCH=256 # four mini-batches: from the second on the current policy is not pi_old
SEQUENCES=2
GPU_MEMORY=0.6
source "$root/recipe/offpolicy/run_common.sh"

# The engine of verl 0.7 reads fsdp_config.strategy instead of actor.strategy.
exec python3 -m recipe.offpolicy.main_offpolicy "${COMMON[@]}" \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.fsdp_config.strategy=fsdp2 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size="$SP" \
    "$@"
