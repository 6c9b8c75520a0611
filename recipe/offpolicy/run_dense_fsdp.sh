#!/usr/bin/env bash
# GRPO of a dense model with off-policy corrections: FSDP2 trainer, vLLM rollouts on the same GPUs, any supported verl.
# Arguments are Hydra overrides; --check among them runs the start-up checks and exits, --cfg job at their end shows
# what they make.
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
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # the comment above
    sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "${BASH_SOURCE[0]}"
    exit
fi

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/train.parquet}
VAL_FILE=${VAL_FILE:-$HOME/data/val.parquet}
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
ROLLOUT_TP=${ROLLOUT_TP:-2}
SP=${SP:-1}
CORRECTION=${CORRECTION:-tis_token,gsm}

MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-2048}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-8192}
# Of packed micro-batches; one sequence at least has to fit.
MAX_TOKENS=$(((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH) * 2))

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
    actor_rollout_ref.model.enable_gradient_checkpointing=true
)

ACTOR=(
    actor_rollout_ref.actor.strategy=fsdp2
    # What the engine of 0.7 reads in its place.
    actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=1e-6
    # Four gradient steps a batch: from the second on the current policy is not pi_old.
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$MAX_TOKENS"
    actor_rollout_ref.actor.ulysses_sequence_parallel_size="$SP"
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=token-mean
)

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

TRAINER=(
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$GPUS_PER_NODE"
    trainer.logger='[console]'
    trainer.project_name=offpolicy
    trainer.experiment_name=dense_fsdp
    trainer.total_epochs=1
    trainer.save_freq=20
    trainer.test_freq=10
    trainer.val_before_train=false
)

# A checkout or a fork that is not installed is found from anywhere.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec python3 -m recipe.offpolicy.main_offpolicy \
    "${ALGORITHM[@]}" "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "$@"
