"""Contracts on verl's asynchronous replay buffer and on how its V1 trainer issues prompts; nothing is patched here.

A run with ``offpolicy.staleness.eta`` overrides them; others call verl's own, and are not held to them.
"""

from __future__ import annotations

from functools import partial

from .engine_loss import seam
from .releases import specifiers

_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_BUFFER = "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync"
_BASE = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"
_seam = partial(seam, releases=specifiers(lambda release: release.staleness_limit), option="offpolicy.staleness.eta")

SEAMS = (
    # All that verl's buffer is made with: what is built in its place gets the same.
    _seam(
        "_build_replay_buffer",
        f"{_TRAINER}._build_replay_buffer",
        "(self)",
        keys=(
            (
                "trainer_mode",
                "trainer_config",
                "max_off_policy_threshold",
                "max_off_policy_strategy",
                "sampler_kwargs",
                "refill_fn",
            ),
            "filter_groups_metric",
            "sync_refill_failed_groups",
        ),
        names=("_resolve_filter_groups_metric", "_add_prompts_to_generate"),
    ),
    _seam(
        "ReplayBuffer",
        f"{_BASE}.__init__",
        "(self, trainer_mode, trainer_config, max_off_policy_threshold, max_off_policy_strategy, sampler_kwargs, "
        "poll_interval=2.0, refill_fn=None, filter_groups_metric=None, train_batch_size=None, gen_batch_size=None, "
        "max_inflight_gen_batches=1, sync_refill_failed_groups=False)",
    ),
    _seam("prepare_step", f"{_TRAINER}.prepare_step", "(self)", names=("_add_batch_to_generate",)),
    _seam(
        "_add_async_warmup_batches",
        f"{_TRAINER}._add_async_warmup_batches",
        "(self, num_warmup_batches)",
        names=("_add_prompts_to_generate",),
    ),
    _seam(
        "_add_prompts_to_generate",
        f"{_TRAINER}._add_prompts_to_generate",
        "(self, num_prompts)",
        names=("_next_train_batch", "_submit_batch_to_rollout"),
    ),
    # Each prompt of an asynchronous run stays in TransferQueue under its uid, from which it can be issued again.
    _seam(
        "_submit_batch_to_rollout",
        f"{_TRAINER}._submit_batch_to_rollout",
        "(self, batch)",
        keys=("uid", "is_prompt", "global_steps"),
        names=("kv_batch_put", "generate_sequences"),
    ),
    _seam("restored prompts", f"{_TRAINER}._load_checkpoint", "(self)", names=("_restored_tq_prompt_count",)),
    _seam(
        "sample",
        f"{_BUFFER}.sample",
        "(self, global_steps, partition_id, batch_size)",
        names=("wait_for_sampleable", "_select_prompt_uids"),
    ),
    _seam(
        "wait_for_sampleable",
        f"{_BUFFER}.wait_for_sampleable",
        "(self, global_steps, partition_id, target_count)",
        names=("_evict_terminal_groups", "_has_enough_samples", "_wait_for_next_poll", "refill_fn"),
    ),
    _seam(
        "_terminal_eviction_reasons",
        f"{_BUFFER}._terminal_eviction_reasons",
        "(self, global_steps, partition_id)",
        names=("_stale_terminal_keys",),
    ),
    _seam("_stale_terminal_keys", f"{_BUFFER}._stale_terminal_keys", "(self, global_steps, partition_id)"),
    _seam(
        "_evict_terminal_groups",
        f"{_BASE}._evict_terminal_groups",
        "(self, global_steps, partition_id, eviction_reasons)",
    ),
    _seam("_wait_for_next_poll", f"{_BASE}._wait_for_next_poll", "(self, partition_id, last_debug_time)"),
    _seam(
        "_has_enough_samples",
        f"{_BUFFER}._has_enough_samples",
        "(self, global_steps, partition_id, batch_size, sampleable_keys)",
        names=("max_off_policy_threshold", "prompt_global_steps"),
    ),
    _seam("_select_prompt_uids", f"{_BASE}._select_prompt_uids", "(self, partition_id, sampleable_keys, batch_size)"),
    _seam(
        "versions of a row",
        "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess",
        None,
        keys=("min_global_steps", "max_global_steps", "global_steps", "response_len"),
    ),
)
"""What ``recipe.offpolicy.staleness.buffer`` and ``.staleness_limit`` override or rely on."""
