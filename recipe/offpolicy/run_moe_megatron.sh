#!/usr/bin/env bash
# GRPO of a mixture of experts with off-policy corrections: Megatron trainer with tensor, pipeline and expert
# parallelism, and vLLM rollouts on the same GPUs. The trainer replays their expert routes (R3). Any supported verl.
# Arguments are Hydra overrides. With --check among them, the script runs the start-up checks and exits; with --cfg job
# at the end, it prints the composed config.
#
#   MODEL_PATH      Hugging Face model (default Qwen/Qwen3-30B-A3B)
#   TRAIN_FILE, VAL_FILE   parquet files of prompts (default ~/data/train.parquet, ~/data/val.parquet)
#   MAX_PROMPT_LENGTH, MAX_RESPONSE_LENGTH   in tokens (default 2048 and 8192)
#   NNODES, GPUS_PER_NODE  default 2 and 8
#   TP, PP, CP, EP, ETP    parallel sizes of the trainer: tensor, pipeline, context, expert and, within an expert,
#                   tensor (default 4, 2, 1, 8, 1)
#   ROLLOUT_TP      GPUs that share one rollout engine (default 4)
#   ROUTER_REPLAY   R3: replays the rollout's routes; R2: those of the trainer's first pass; disabled (default R3)
#   CORRECTION      options, separated by commas (default tis_token,gsm)
#
# On a Ray cluster, from the project: bash scripts/launch_ray.sh NNODES=4 recipe/offpolicy/run_moe_megatron.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-30B-A3B}
NNODES=${NNODES:-2}
TP=${TP:-4}
PP=${PP:-2}
CP=${CP:-1}
EP=${EP:-8}
ETP=${ETP:-1}
ROLLOUT_TP=${ROLLOUT_TP:-4}
ROUTER_REPLAY=${ROUTER_REPLAY:-R3}
CORRECTION=${CORRECTION:-tis_token,gsm}
NAME=moe_megatron
TRAIN_BATCH=256 # four mini-batches: from the second on the current policy is not pi_old
SEQUENCES=1
GPU_MEMORY=0.6
source "$root/recipe/offpolicy/run_common.sh"

MEGATRON=(
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$TP"
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$PP"
    actor_rollout_ref.actor.megatron.context_parallel_size="$CP"
    actor_rollout_ref.actor.megatron.expert_model_parallel_size="$EP"
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size="$ETP"
    actor_rollout_ref.actor.megatron.use_mbridge=true
    actor_rollout_ref.actor.megatron.param_offload=true
    actor_rollout_ref.actor.megatron.optimizer_offload=true
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
    # With a more precise router, the trainer and the rollout engine agree on more of the close choices.
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
)
if grep -q '^grad_offload:' "$verl/trainer/config/engine/megatron.yaml"; then
    MEGATRON+=(actor_rollout_ref.actor.megatron.grad_offload=true)
fi
# The legacy actor and the engines read the mode from different keys.
if [[ -f $verl/workers/actor/megatron_actor.py && " $* " != *" trainer.use_legacy_worker_impl=disable "* ]]; then
    MEGATRON+=(actor_rollout_ref.actor.router_replay.mode="$ROUTER_REPLAY")
else
    MEGATRON+=(actor_rollout_ref.actor.megatron.router_replay.mode="$ROUTER_REPLAY")
fi

if [[ $ROUTER_REPLAY == R3 ]]; then
    MEGATRON+=(actor_rollout_ref.rollout.enable_rollout_routing_replay=true)
fi

exec python3 -m recipe.offpolicy.main_offpolicy --config-name=offpolicy_megatron_trainer \
    "${COMMON[@]}" "${MEGATRON[@]}" "$@"
