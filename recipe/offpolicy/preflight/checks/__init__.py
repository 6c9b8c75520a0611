"""Start-up checks for settings that would leave a configured correction unused, make it wrong, or apply it twice.

Each check reads the composed configuration and yields problems that name the key, its value and the fix. ``CHECKS``
stop a launch; ``REMARKS`` report settings that are probably unintended but are not a reason to stop.
``preflight.examination.examine`` runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...correction import Problem
from ..composed import Composed
from . import base_loss, correction, path, rollout, run_keys, staleness, verl_correction

Check = Callable[[Composed], Iterator[Problem]]
"""A function that yields the problems of a composed configuration."""
VERL_CHECKS: tuple[Check, ...] = (
    run_keys.check_engine_is_named,
    run_keys.check_choices,
    run_keys.check_resume,
    run_keys.check_folders,
    run_keys.check_numbers,
    verl_correction.check_trainer_mode,
    verl_correction.check_former_names,
    verl_correction.check_decoupled,
    verl_correction.check_bypass,
    verl_correction.check_legacy_mu,
    rollout.check_router_replay,
    verl_correction.check_misplaced,
    verl_correction.check_thresholds,
    rollout.check_logprobs_mode,
    rollout.check_sampling,
    rollout.check_agent_loops,
    base_loss.check_base_loss_of_verl,
)
"""Checks that also apply to verl's own correction, in launches of verl's programs and of ours."""
CHECKS: tuple[Check, ...] = (
    path.check_seams,
    path.check_path,
    path.check_program,
    path.check_lora,
    path.check_workers_env,
    staleness.check_own_keys,
    staleness.check_staleness,
    rollout.check_routing_replay,
    rollout.check_megatron_replay,
    rollout.check_model_runner,
    rollout.check_support,
    rollout.check_recorded_without_replay,
    correction.check_bounds,
    correction.check_parts,
    correction.check_proximal,
    correction.check_ppo_ratio,
    path.check_version_level,
    staleness.check_ages,
    correction.check_kl,
    correction.check_denominator,
    correction.check_baseline,
    rollout.check_rollout_log_probs,
    rollout.check_bucket,
    run_keys.check_micro_batches,
    verl_correction.check_not_both,
    correction.check_distillation,
    *VERL_CHECKS,
    base_loss.check_base_loss,
    staleness.check_extensions,
)
REMARKS: tuple[Check, ...] = (
    correction.warn_bounds_never_seen,
    correction.warn_level_version,
    correction.warn_wide_caps,
    correction.warn_short_answers,
    correction.warn_no_staleness,
    staleness.warn_verls_limit,
    staleness.warn_asynchronous,
    staleness.warn_ages,
    run_keys.warn_unlike_micro_batches,
    rollout.warn_one_seed,
    correction.warn_kl_left_out,
    correction.warn_collapsed_rewards,
    staleness.warn_extensions,
    path.warn_not_shown,
)
