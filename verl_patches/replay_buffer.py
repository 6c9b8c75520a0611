"""Contracts on verl's asynchronous replay buffer, and on how V1 trainers issue prompts; nothing is patched here.

A run with ``offpolicy.staleness.eta`` overrides these methods; all other runs call verl's own methods, and do not need
these contracts.
"""

from __future__ import annotations

from .engine_loss import Seams
from .releases import specifiers

_OF_LIMIT = (specifiers(lambda release: release.staleness_limit), "offpolicy.staleness.eta")
_trainer = Seams("verl.trainer.ppo.v1.trainer_base:PPOTrainer", *_OF_LIMIT)
_buffer = Seams("verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync", *_OF_LIMIT)
_base = Seams("verl.trainer.ppo.v1.replay_buffer:ReplayBuffer", *_OF_LIMIT)
_agent_loop = Seams("verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.__ray_metadata__.modified_class", *_OF_LIMIT)

SEAMS = (
    # All constructor arguments of verl's buffer; its replacement receives the same arguments.
    _trainer(
        "_build_replay_buffer",
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
    _base(
        "__init__",
        "(self, trainer_mode, trainer_config, max_off_policy_threshold, max_off_policy_strategy, sampler_kwargs, "
        "poll_interval=2.0, refill_fn=None, filter_groups_metric=None, train_batch_size=None, gen_batch_size=None, "
        "max_inflight_gen_batches=1, sync_refill_failed_groups=False)",
        name="ReplayBuffer",
    ),
    _trainer("prepare_step", "(self)", names=("_add_batch_to_generate",)),
    _trainer("_add_async_warmup_batches", "(self, num_warmup_batches)", names=("_add_prompts_to_generate",)),
    _trainer(
        "_add_prompts_to_generate", "(self, num_prompts)", names=("_next_train_batch", "_submit_batch_to_rollout")
    ),
    # In an asynchronous run, each prompt stays in TransferQueue under its uid, so the prompt can be issued again.
    _trainer(
        "_submit_batch_to_rollout",
        "(self, batch)",
        keys=("uid", "is_prompt", "global_steps"),
        names=("kv_batch_put", "generate_sequences"),
    ),
    _trainer("_load_checkpoint", "(self)", name="restored prompts", names=("_restored_tq_prompt_count",)),
    _buffer(
        "sample", "(self, global_steps, partition_id, batch_size)", names=("wait_for_sampleable", "_select_prompt_uids")
    ),
    _buffer(
        "wait_for_sampleable",
        "(self, global_steps, partition_id, target_count)",
        names=("_evict_terminal_groups", "_has_enough_samples", "_wait_for_next_poll", "refill_fn"),
    ),
    _buffer("_terminal_eviction_reasons", "(self, global_steps, partition_id)", names=("_stale_terminal_keys",)),
    _buffer("_stale_terminal_keys", "(self, global_steps, partition_id)"),
    _base("_evict_terminal_groups", "(self, global_steps, partition_id, eviction_reasons)"),
    _base("_wait_for_next_poll", "(self, partition_id, last_debug_time)"),
    _buffer(
        "_has_enough_samples",
        "(self, global_steps, partition_id, batch_size, sampleable_keys)",
        names=("max_off_policy_threshold", "prompt_global_steps"),
    ),
    _base("_select_prompt_uids", "(self, partition_id, sampleable_keys, batch_size)"),
    _agent_loop(
        "_agent_loop_postprocess",
        name="versions of a row",
        keys=("min_global_steps", "max_global_steps", "global_steps", "response_len"),
    ),
)
"""Parts of verl that ``recipe.offpolicy.staleness.buffer`` and ``.staleness_limit`` override or rely on."""
