#!/usr/bin/env bash
# GRPO of a mixture of experts with off-policy corrections: Megatron trainer with tensor, pipeline and expert
# parallelism, vLLM rollouts on the same GPUs whose routes the trainer replays (R3), any supported verl.
# Arguments are Hydra overrides; --check among them runs the start-up checks and exits, --cfg job at their end shows
# what they make.
#
#   MODEL_PATH      Hugging Face model (default Qwen/Qwen3-30B-A3B)
#   TRAIN_FILE, VAL_FILE   parquet files of prompts (default ~/data/train.parquet, ~/data/val.parquet)
#   MAX_PROMPT_LENGTH, MAX_RESPONSE_LENGTH   in tokens (default 2048 and 8192)
#   NNODES, GPUS_PER_NODE  default 2 and 8
#   TP, PP, CP, EP, ETP    parallel sizes of the trainer: tensor, pipeline, context, expert and, within an expert,
#                   tensor (default 4, 2, 1, 8, 1)
#   ROLLOUT_TP      GPUs that share one rollout engine (default 4)
#   ROUTER_REPLAY   R3: the rollout's routes; R2: those of the trainer's first pass; disabled (default R3)
#   CORRECTION      options, separated by commas (default tis_token,gsm)
#
# On a Ray cluster, from the project: bash scripts/launch_ray.sh NNODES=4 recipe/offpolicy/run_moe_megatron.sh
set -euo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # the comment above
    sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "${BASH_SOURCE[0]}"
    exit
fi

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-30B-A3B}
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/train.parquet}
VAL_FILE=${VAL_FILE:-$HOME/data/val.parquet}
NNODES=${NNODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
TP=${TP:-4}
PP=${PP:-2}
CP=${CP:-1}
EP=${EP:-8}
ETP=${ETP:-1}
ROLLOUT_TP=${ROLLOUT_TP:-4}
ROUTER_REPLAY=${ROUTER_REPLAY:-R3}
CORRECTION=${CORRECTION:-tis_token,gsm}

MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-2048}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-8192}
# Of packed micro-batches; one sequence at least has to fit.
MAX_TOKENS=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))

# A checkout or a fork that is not installed is found from anywhere.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# Releases differ in some keys: the installed verl's own configuration tells.
verl=$(python3 - <<'PY'
import importlib.util
import sys

spec = importlib.util.find_spec("verl")
if spec is None:
    sys.exit(f"verl is not installed for {sys.executable}")
print(spec.submodule_search_locations[0])
PY
)
configs=$verl/trainer/config

ALGORITHM=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=false
)
# Options of a group are chosen once: those among the arguments take the place of these.
if [[ " $* " != *" correction="* ]]; then
    ALGORITHM+=("correction=[$CORRECTION]")
fi

DATA=(
    data.train_files="$TRAIN_FILE"
    data.val_files="$VAL_FILE"
    data.train_batch_size=256
    data.max_prompt_length="$MAX_PROMPT_LENGTH"
    data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.filter_overlong_prompts=true
    data.truncation=error
)

MODEL=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=true
)

ACTOR=(
    actor_rollout_ref.actor.optim.lr=1e-6
    # Four gradient steps a batch: from the second on the current policy is not pi_old.
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$MAX_TOKENS"
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=token-mean
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
    # Close calls between experts go the rollout's way more often.
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
)
if grep -q '^grad_offload:' "$configs/engine/megatron.yaml"; then
    ACTOR+=(actor_rollout_ref.actor.megatron.grad_offload=true)
fi
# The legacy actor reads the mode from one place, engines from another.
if [[ -f $verl/workers/actor/megatron_actor.py && " $* " != *" trainer.use_legacy_worker_impl=disable "* ]]; then
    ACTOR+=(actor_rollout_ref.actor.router_replay.mode="$ROUTER_REPLAY")
else
    ACTOR+=(actor_rollout_ref.actor.megatron.router_replay.mode="$ROUTER_REPLAY")
fi

ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP"
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$MAX_TOKENS"
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
)
if [[ $ROUTER_REPLAY == R3 ]]; then
    ROLLOUT+=(actor_rollout_ref.rollout.enable_rollout_routing_replay=true)
fi

TRAINER=(
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$GPUS_PER_NODE"
    trainer.logger='[console]'
    trainer.project_name=offpolicy
    trainer.experiment_name=moe_megatron
    trainer.total_epochs=1
    trainer.save_freq=20
    trainer.test_freq=10
    trainer.val_before_train=false
)

exec python3 -m recipe.offpolicy.main_offpolicy --config-name=offpolicy_megatron_trainer \
    "${ALGORITHM[@]}" "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "$@"
