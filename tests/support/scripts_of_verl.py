"""Launch scripts like verl's own, with the overrides of its rollout-correction examples."""

from __future__ import annotations

RLOO = """\
#!/usr/bin/env bash
set -xeuo pipefail

rollout_is="sequence"          # self-normalised
rollout_is_threshold=2.0
MODEL_PATH=${MODEL_PATH:-"Qwen/Qwen2.5-7B"}
TRAIN_FILE=${TRAIN_FILE:-"data/train.parquet"}

python3 -m verl.trainer.main_ppo \\
    data.train_files="${TRAIN_FILE}" \\
    data.train_batch_size=128 \\
    algorithm.adv_estimator=rloo \\
    algorithm.rollout_correction.rollout_is=${rollout_is} \\
    algorithm.rollout_correction.rollout_is_threshold=${rollout_is_threshold} \\
    algorithm.rollout_correction.rollout_is_batch_normalize=true \\
    algorithm.rollout_correction.rollout_rs=null \\
    algorithm.rollout_correction.rollout_rs_threshold=null \\
    algorithm.rollout_correction.bypass_mode=true \\
    algorithm.rollout_correction.loss_type=reinforce \\
    actor_rollout_ref.model.path="${MODEL_PATH}" \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.rollout.calculate_log_probs=True \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.rollout.name=vllm \\
    trainer.logger='["console","wandb"]' "$@"

echo "done: ${rollout_is}"
"""
"""Self-normalised sequence weights in bypass mode, as a REINFORCE loss."""

MULTI_RS = """\
rollout_rs="token_k1,seq_max_k2"
rollout_rs_threshold="0.6_1.6,2.5"

python3 -m verl.trainer.main_ppo \\
    data.train_batch_size=128 \\
    algorithm.adv_estimator=grpo \\
    algorithm.rollout_correction.rollout_is=token \\
    algorithm.rollout_correction.rollout_is_threshold=2.0 \\
    algorithm.rollout_correction.rollout_rs=\\'${rollout_rs}\\' \\
    algorithm.rollout_correction.rollout_rs_threshold=\\'${rollout_rs_threshold}\\' \\
    algorithm.rollout_correction.bypass_mode=true \\
    algorithm.rollout_correction.loss_type=ppo_clip \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.rollout.calculate_log_probs=True \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.rollout.name=vllm $@
"""
"""Two rejections in bypass mode around PPO's clip."""

DECOUPLED = """\
ROLLOUT=(actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.calculate_log_probs=true)
ALGORITHM=(
    algorithm.rollout_correction.rollout_is=token   # three policies
    algorithm.rollout_correction.rollout_rs=seq_mean_k1
    "algorithm.rollout_correction.rollout_rs_threshold='0.999_1.001'"
)
python3 -m verl.trainer.main_ppo "${ALGORITHM[@]}" "${ROLLOUT[@]}" \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 "$@"
"""
"""Token weights and a geometric rejection, decoupled."""
