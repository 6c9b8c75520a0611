#!/usr/bin/env bash
# Asynchronous GRPO with off-policy corrections: verl's separate_async, whose rollouts have GPUs of their own and go on
# sampling while the trainer (FSDP2) makes SYNC_STEPS updates. verl 0.9.1; with earlier releases it is not covered.
# Arguments are Hydra overrides; --check among them runs the start-up checks and exits, --cfg job at their end shows
# what they make.
#
#   MODEL_PATH      Hugging Face model (default Qwen/Qwen3-8B)
#   TRAIN_FILE, VAL_FILE   parquet files of prompts (default ~/data/train.parquet, ~/data/val.parquet)
#   MAX_PROMPT_LENGTH, MAX_RESPONSE_LENGTH   in tokens (default 2048 and 8192)
#   NNODES, GPUS_PER_NODE  of the trainer (default 1 and 8)
#   ROLLOUT_NNODES, ROLLOUT_GPUS_PER_NODE   of the rollouts (default 1 and 8)
#   ROLLOUT_TP      GPUs that share one rollout engine (default 2)
#   SYNC_STEPS      updates between two synchronisations of the weights (default 4)
#   MAX_STALENESS   versions of the weights that a row may span; older rows are dropped (default 8)
#   TRANSPORT       verl's checkpoint engine that carries the weights: nccl, nixl ... (default nccl)
#   CORRECTION      options, separated by commas (default decoupled_ppo)
#
# On a Ray cluster, from the project: bash scripts/launch_ray.sh ROLLOUT_NNODES=2 recipe/offpolicy/run_async.sh
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
ROLLOUT_NNODES=${ROLLOUT_NNODES:-1}
ROLLOUT_GPUS_PER_NODE=${ROLLOUT_GPUS_PER_NODE:-8}
ROLLOUT_TP=${ROLLOUT_TP:-2}
SYNC_STEPS=${SYNC_STEPS:-4}
MAX_STALENESS=${MAX_STALENESS:-8}
TRANSPORT=${TRANSPORT:-nccl}
CORRECTION=${CORRECTION:-decoupled_ppo}

MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-2048}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-8192}
# Of packed micro-batches; one sequence at least has to fit.
MAX_TOKENS=$(((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH) * 2))
MINI_BATCH=64

# A checkout or a fork that is not installed is found from anywhere.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
verl=$(python3 - <<'PY'
import importlib.util
import sys

spec = importlib.util.find_spec("verl")
if spec is None:
    sys.exit(f"verl is not installed for {sys.executable}")
print(spec.submodule_search_locations[0])
PY
)
if ! grep -q '^ *separate_async:' "$verl/trainer/config/ppo_trainer.yaml"; then
    echo "run_async.sh: verl $(< "$verl/version/version") has no trainer.v1.separate_async, which came with 0.9, and" \
        "its experimental asynchronous trainers are not covered by the correction. Fix: install verl 0.9.1, or take" \
        "run_dense_fsdp.sh, whose rollouts wait for the trainer." >&2
    exit 1
fi

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
    # verl demands one mini-batch for each update between two synchronisations.
    data.train_batch_size=$((SYNC_STEPS * MINI_BATCH))
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
    actor_rollout_ref.hybrid_engine=false
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH"
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$MAX_TOKENS"
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=token-mean
)

ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.nnodes="$ROLLOUT_NNODES"
    actor_rollout_ref.rollout.n_gpus_per_node="$ROLLOUT_GPUS_PER_NODE"
    actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP"
    # These GPUs hold nothing of the trainer.
    actor_rollout_ref.rollout.gpu_memory_utilization=0.85
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$MAX_TOKENS"
    actor_rollout_ref.rollout.checkpoint_engine.backend="$TRANSPORT"
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
)

TRAINER=(
    trainer.use_v1=true
    trainer.v1.trainer_mode=separate_async
    trainer.v1.separate_async.parameter_sync_step="$SYNC_STEPS"
    trainer.v1.separate_async.num_warmup_batches=1
    trainer.v1.sampler.max_off_policy_threshold="$MAX_STALENESS"
    trainer.v1.sampler.max_off_policy_strategy=drop
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$GPUS_PER_NODE"
    trainer.logger='[console]'
    trainer.project_name=offpolicy
    trainer.experiment_name=async
    trainer.total_epochs=1
    trainer.save_freq=20
    trainer.test_freq=10
    trainer.val_before_train=false
)

exec python3 -m recipe.offpolicy.main_offpolicy \
    "${ALGORITHM[@]}" "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "$@"
