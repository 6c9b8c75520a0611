"""Contracts on the methods of verl's trainers that a corrected trainer overrides, and the wrappers around them.

V0 is ``RayPPOTrainer``. Its ``fit`` is a single long method that calls the module-level function ``compute_advantage``.
Hooks around the advantages therefore wrap this function, both in its own module and in modules that have imported it by
name.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, MutableMapping
from operator import attrgetter
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .contract import Contract, PatchError, Seams, loaded, logger, resolve, wrap
from .releases import specifiers

_V0_PROGRAM = "verl.trainer.main_ppo_v0"
"""Module of the V0 task runner, in releases whose main_ppo contains a different task runner."""
_V0_TRAINER = "verl.trainer.ppo.ray_trainer"
_V1 = "verl.trainer.ppo.v1"
_V1_TRAINER = f"{_V1}.trainer_base:PPOTrainer"

_ADVANTAGE = Seams(_V0_TRAINER)(
    "compute_advantage(data, adv_estimator, gamma=1.0, lam=1.0, num_repeat=1, norm_adv_by_std_in_grpo=True, "
    "config=None)"
)
_v0 = Seams(f"{_V0_TRAINER}:RayPPOTrainer")
V0 = (
    _v0("init_workers(self)"),
    _v0("_compute_old_log_prob(self, batch)", names="actor_rollout_wg compute_log_prob"),
    _v0("_compute_ref_log_prob(self, batch)"),
    _v0("_update_actor(self, batch)", names="actor_rollout_wg update_actor"),
    _v0(
        "fit(self)",
        names="compute_advantage _get_gen_batch _compute_old_log_prob _update_actor _save_checkpoint _load_checkpoint "
        "_validate",
    ),
    _v0("_get_gen_batch(self, batch)"),
    _v0("_validate(self, merged=False)", names="_val_metrics_update"),
    _v0("_val_metrics_update(self, data_sources, sample_uids, reward_extra_infos_dict, ...)"),
    _v0("_get_dp_size(self, worker_group, role)"),
    _v0("_save_checkpoint(self)"),
    _v0("_load_checkpoint(self)", names="train_dataloader"),
    _ADVANTAGE,
)

_separate = Seams(
    "verl.experimental.separation.ray_trainer:SeparateRayPPOTrainer",
    specifiers(attrgetter("separate_programs")),
)
PROGRAMS = (
    _separate("_init_models(self)", names="actor_rollout_wg"),
    _separate("_fit_compute_log_prob(self, batch)", names="_compute_old_log_prob"),
    _separate("_fit_compute_advantage(self, batch)", names="compute_advantage"),
    _separate("_fit_update_actor(self, batch)", names="_update_actor"),
)
"""Functions on which the trainers of fully_async_policy and one_step_off_policy rely."""

_OF_V1 = specifiers(attrgetter("v1_modes"))
_v1 = Seams(_V1_TRAINER, _OF_V1)
V1 = (
    _v1("init(self)", names="_setup on_init_end"),
    _v1("_setup(self)", names="_load_checkpoint"),
    _v1("on_init_end(self)"),
    _v1("fit(self, agent_loop_manager)", names="step _save_checkpoint _validate"),
    _v1("step(self, metrics, timing_raw)", names="_step_once"),
    _v1("_step_once", names="_compute_old_log_prob _compute_advantage _update_actor"),
    _v1("_compute_old_log_prob(self, batch, metrics)", names="actor_rollout_wg compute_log_prob"),
    _v1("_compute_ref_log_prob(self, batch, metrics)"),
    _v1("_compute_advantage(self, batch, metrics)"),
    _v1("_update_actor(self, batch, metrics)", names="actor_rollout_wg update_actor"),
    # This method sets the ranks of the actor's workers, which determine how rows are split.
    _v1("_balance_batch", names="_dispatch_info"),
    _v1("_next_train_batch(self, num_prompts=None)"),
    _v1("_add_batch_to_generate", names="_next_train_batch"),
    _v1("_validate(self)", names="_val_metrics_update"),
    _v1("_val_metrics_update(self, data_sources, sample_uids, reward_extra_infos_dict, ...)"),
    _v1("_save_checkpoint(self)"),
    _v1("_load_checkpoint(self)", names="train_dataloader"),
    Seams("verl.trainer.main_ppo", _OF_V1)("run_ppo(config, task_runner_class)"),
)

_OF_SNAPSHOTS = (specifiers(attrgetter("token_versions")), "offpolicy.late_weights.snapshots")
_worker = Seams("verl.experimental.separation.engine_workers:DetachActorWorker", *_OF_SNAPSHOTS)
SNAPSHOTS = (
    Seams(_V1_TRAINER, *_OF_SNAPSHOTS)(
        "_init_resource_pool_mgr(self)", names="role_worker_mapping ActorRolloutRefWorker"
    ),
    _worker("save_model_to_cpu(self, n)", names="cpu_saved_models"),
    _worker("restore_model_from_cpu(self, n)", names="cpu_saved_models"),
    _worker("clear_cpu_model(self, n)", names="cpu_saved_models"),
)
"""Functions on which a trainer that keeps snapshots of weights relies."""

_OF_LIMIT = (specifiers(attrgetter("staleness_limit")), "offpolicy.staleness.eta")
_limited = Seams(_V1_TRAINER, *_OF_LIMIT)
_buffer = Seams(f"{_V1}.replay_buffer:ReplayBufferAsync", *_OF_LIMIT)
_base = Seams(f"{_V1}.replay_buffer:ReplayBuffer", *_OF_LIMIT)
_BUFFER_ARGUMENTS = (
    *("trainer_mode", "trainer_config", "max_off_policy_threshold", "max_off_policy_strategy"),
    *("sampler_kwargs", "refill_fn"),
)
STALENESS = (
    # All constructor arguments of verl's buffer; its replacement receives the same arguments.
    _limited(
        "_build_replay_buffer(self)",
        keys=(_BUFFER_ARGUMENTS, "filter_groups_metric", "sync_refill_failed_groups"),
        names="_resolve_filter_groups_metric _add_prompts_to_generate",
    ),
    _base(
        "__init__(self, trainer_mode, trainer_config, max_off_policy_threshold, max_off_policy_strategy, "
        "sampler_kwargs, poll_interval=2.0, refill_fn=None, filter_groups_metric=None, train_batch_size=None, "
        "gen_batch_size=None, max_inflight_gen_batches=1, sync_refill_failed_groups=False)",
        name="ReplayBuffer",
    ),
    _limited("prepare_step(self)", names="_add_batch_to_generate"),
    _limited("_add_async_warmup_batches(self, num_warmup_batches)", names="_add_prompts_to_generate"),
    _limited("_add_prompts_to_generate(self, num_prompts)", names="_next_train_batch _submit_batch_to_rollout"),
    # In an asynchronous run, each prompt stays in TransferQueue under its uid, so the prompt can be issued again.
    _limited(
        "_submit_batch_to_rollout(self, batch)",
        keys="uid is_prompt global_steps",
        names="kv_batch_put generate_sequences",
    ),
    _limited("_load_checkpoint(self)", name="restored prompts", names="_restored_tq_prompt_count"),
    _buffer("sample(self, global_steps, partition_id, batch_size)", names="wait_for_sampleable _select_prompt_uids"),
    _buffer(
        "wait_for_sampleable(self, global_steps, partition_id, target_count)",
        names="_evict_terminal_groups _has_enough_samples _wait_for_next_poll refill_fn",
    ),
    _buffer("_terminal_eviction_reasons(self, global_steps, partition_id)", names="_stale_terminal_keys"),
    _buffer("_stale_terminal_keys(self, global_steps, partition_id)"),
    _base("_evict_terminal_groups(self, global_steps, partition_id, eviction_reasons)"),
    _base("_wait_for_next_poll(self, partition_id, last_debug_time)"),
    _buffer(
        "_has_enough_samples(self, global_steps, partition_id, batch_size, sampleable_keys)",
        names="max_off_policy_threshold prompt_global_steps",
    ),
    _base("_select_prompt_uids(self, partition_id, sampleable_keys, batch_size)"),
    Seams(f"{_V1}.agent_loop_tq:AgentLoopWorkerTQ.__ray_metadata__.modified_class", *_OF_LIMIT)(
        "_agent_loop_postprocess",
        name="versions of a row",
        keys="min_global_steps max_global_steps global_steps response_len",
    ),
)
"""Parts of verl that ``recipe.offpolicy.staleness.buffer`` and ``.staleness_limit`` override or rely on."""


def find_task_runner(config: DictConfig) -> Any:
    """Return verl's task runner for the configured trainer; None if there is only one task runner."""
    module = importlib.import_module("verl.trainer.main_ppo")
    if OmegaConf.select(config, "trainer.use_v1", default=False) and hasattr(module, "TaskRunnerV1"):
        return module.TaskRunnerV1
    return importlib.import_module(_V0_PROGRAM).TaskRunner if importlib.util.find_spec(_V0_PROGRAM) else None


_around: list[Callable[..., Any]] = []


def plain_advantage() -> Callable[..., Any]:
    """Return verl's own ``compute_advantage``, which both trainers call, without this module's wrapper."""
    found: Callable[..., Any] = inspect.unwrap(importlib.import_module(_V0_TRAINER).compute_advantage)
    return found


def hook_advantage() -> None:
    """Wrap ``compute_advantage``, also in modules that have imported it by name. Idempotent."""
    module = importlib.import_module(_V0_TRAINER)
    plain = module.compute_advantage
    wrap(_ADVANTAGE, _compute_advantage)
    # Ray sends functions of ``__main__`` by value, together with what they have imported by name.
    for names in [vars(each) for each in list(sys.modules.values()) if isinstance(each, ModuleType)]:
        for name in [name for name, value in names.items() if value is plain]:
            names[name] = module.compute_advantage


def around_advantage(hook: Callable[..., Any]) -> None:
    """Run ``hook(compute, data, *args, **kwargs)`` instead of ``compute_advantage``; a later hook replaces this one."""
    # The hook is replaced in place: the function is wrapped only once, and a later trainer's hook replaces the earlier
    # one.
    _around[:] = [hook]
    hook_advantage()


def _compute_advantage(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _around[-1](original, *args, **kwargs) if _around else original(*args, **kwargs)


class _WithoutFlush(logging.LoggerAdapter[logging.Logger]):
    """Proxy for verl's logger that ignores ``flush``."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {key: value for key, value in kwargs.items() if key != "flush"}


_SEPARATE_ASYNC = f"{_V1}.trainer_separate_async"


class _LoggerContract(Contract):
    def in_force(self) -> bool:
        """Return True if the module's logger is the proxy; unlike other patches, this one does not wrap a function."""
        return isinstance(loaded(f"{_SEPARATE_ASYNC}:logger"), _WithoutFlush)


SEPARATE_ASYNC_LOGGER = _LoggerContract(
    "separate_async_logger",
    f"{_SEPARATE_ASYNC}:logger.info",
    "(msg, *args, **kwargs)",
    "verl",
    specifiers(lambda release: "separate_async" in release.v1_modes),
)
PATCHES = (SEPARATE_ASYNC_LOGGER,)


def let_logger_flush() -> None:
    """Let verl's separate asynchronous trainer start without colocated rollouts; imports the trainer's module.

    With ``actor_rollout_ref.hybrid_engine=False``, the trainer logs its start with ``flush=True``, which ``print``
    accepts but a logger does not. This raises a TypeError on every platform, unless VERL_LOGGING_LEVEL is above INFO.

    Raises:
        PatchError: the module's logger is not a logger.
    """
    SEPARATE_ASYNC_LOGGER.check()
    module = resolve(f"{_SEPARATE_ASYNC}:__dict__")
    if SEPARATE_ASYNC_LOGGER.in_force():
        return
    if not isinstance(module["logger"], logging.Logger):
        raise PatchError(SEPARATE_ASYNC_LOGGER.moved(f"a {type(module['logger']).__name__}"))
    module["logger"] = _WithoutFlush(module["logger"], {})
    logger.info("patch %s in force on %s", SEPARATE_ASYNC_LOGGER.name, SEPARATE_ASYNC_LOGGER.target)
