#!/usr/bin/env bash
# Common part of run_dense_fsdp.sh, run_moe_megatron.sh and run_async.sh, which source this file. It launches nothing.
#
#   takes   MODEL_PATH, NNODES, ROLLOUT_TP and CORRECTION, whose defaults differ; TRAIN_BATCH, in prompts; SEQUENCES of
#           full length in a packed micro-batch; GPU_MEMORY, the rollout's share; NAME of the experiment
#   reads   TRAIN_FILE, VAL_FILE, GPUS_PER_NODE, MAX_PROMPT_LENGTH, MAX_RESPONSE_LENGTH, as each script documents them
#   gives   COMMON, an array of Hydra overrides; MAX_TOKENS of a packed micro-batch; MINI_BATCH; `verl`, the folder of
#           the installed package
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # the comment at the top of the script that was called
    sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "$0"
    exit
fi

TRAIN_FILE=${TRAIN_FILE:-$HOME/data/train.parquet}
VAL_FILE=${VAL_FILE:-$HOME/data/val.parquet}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-2048}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-8192}
MAX_TOKENS=$(((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH) * SEQUENCES))
MINI_BATCH=64

# A checkout or a fork that is not installed is found from anywhere.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# Some keys differ between releases, so they are read from the installed verl's own configuration.
verl=$(python3 - <<'PY'
import importlib.util
import sys

spec = importlib.util.find_spec("verl")
if spec is None:
    sys.exit(f"verl is not installed for {sys.executable}")
print(spec.submodule_search_locations[0])
PY
)

COMMON=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=false

    data.train_files="$TRAIN_FILE"
    data.val_files="$VAL_FILE"
    data.train_batch_size="$TRAIN_BATCH"
    data.max_prompt_length="$MAX_PROMPT_LENGTH"
    data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.filter_overlong_prompts=true
    data.truncation=error

    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=true

    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH"
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$MAX_TOKENS"
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=token-mean

    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP"
    actor_rollout_ref.rollout.gpu_memory_utilization="$GPU_MEMORY"
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$MAX_TOKENS"
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0

    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$GPUS_PER_NODE"
    trainer.logger='[console]'
    trainer.project_name=offpolicy
    trainer.experiment_name="$NAME"
    trainer.total_epochs=1
    trainer.save_freq=20
    trainer.test_freq=10
    trainer.val_before_train=false
)
# Hydra accepts one choice per group, so a choice among the arguments replaces the one of this file.
if [[ " $* " != *" correction="* ]]; then
    CORRECTION=${CORRECTION#[}  # with brackets or without
    COMMON+=("correction=[${CORRECTION%]}]")
fi
