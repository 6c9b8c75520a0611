"""Start-up checks for what would leave a configured correction dead, wrong or applied twice.

Each reads the resolved configuration and yields problems that name the key, its value and the fix. ``CHECKS`` stop a
launch; what is rarely meant and no reason to stop is one of ``REMARKS``. ``preflight.examine`` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from omegaconf import DictConfig

from ...correction import CorrectionSpec
from ...correction.problem import Problem
from ..verl_keys.keys import list_active
from . import (
    agent_loops,
    batch_sizes,
    bounds,
    coverage,
    extensions,
    gradient_steps,
    not_shown,
    policy_loss,
    programs,
    rollout,
    routing_replay,
    run_keys,
    seams,
    staleness,
    support,
    verl_rollout_correction,
    warnings,
    workers_env,
)
from .config_reader import SUPPORT_PART, ConfiguredPart, list_parts, read_shadows, read_spec
from .null_sections import find_missing_actor, find_null_sections
from .offpolicy_keys import OWN_KEYS, check_own_keys
from .seams import demand_seams
from .unreadable_values import find_unreadable_values, find_unresolved_interpolations, substitute_usual_values
from .verl_validate_config import check_by_verl
from .workers_env import list_patch_groups

Check = Callable[[DictConfig, CorrectionSpec], Iterator[Problem]]

VERL_CHECKS: tuple[Check, ...] = (
    run_keys.check_engine_is_named,
    run_keys.check_choices,
    run_keys.check_resume,
    run_keys.check_folders,
    run_keys.check_numbers,
    verl_rollout_correction.check_dead_keys,
    verl_rollout_correction.check_thresholds,
    rollout.check_logprobs_mode,
    rollout.check_sampling,
    agent_loops.check_agent_loops,
    policy_loss.check_base_loss_of_verl,
)
"""Checks that apply to verl's own correction too, launched by verl's program or by ours."""
CHECKS: tuple[Check, ...] = (
    seams.check_seams,
    coverage.check_path,
    programs.check_program,
    programs.check_lora,
    workers_env.check_workers_env,
    check_own_keys,
    staleness.check_staleness,
    routing_replay.check_routing_replay,
    routing_replay.check_megatron_replay,
    support.check_support,
    routing_replay.check_recorded_without_replay,
    bounds.check_bounds_hold_agreement,
    bounds.check_bounds_in_reach,
    bounds.check_token_aggregates,
    bounds.check_weight_ratio,
    gradient_steps.check_proximal,
    gradient_steps.check_proximal_is_read,
    gradient_steps.check_ppo_ratio,
    seams.check_version_level,
    staleness.check_ages,
    bounds.check_skyrl_compat,
    policy_loss.check_kl_clip,
    policy_loss.check_kl_weight,
    policy_loss.check_denominator,
    policy_loss.check_baseline,
    rollout.check_rollout_log_probs,
    rollout.check_consent,
    rollout.check_bucket,
    batch_sizes.check_micro_batches,
    verl_rollout_correction.check_not_both,
    policy_loss.check_distillation,
    *VERL_CHECKS,
    policy_loss.check_base_loss,
    extensions.check_extensions,
)
REMARKS: tuple[Check, ...] = (
    bounds.warn_bounds_never_seen,
    warnings.warn_level_version,
    warnings.warn_wide_caps,
    warnings.warn_no_staleness,
    staleness.warn_verls_limit,
    staleness.warn_uncorrected,
    staleness.warn_weight_alone,
    staleness.warn_narrow_bands,
    staleness.warn_ages,
    warnings.warn_unlike_micro_batches,
    warnings.warn_kl_left_out,
    warnings.warn_collapsed_rewards,
    extensions.warn_extensions,
    not_shown.warn_not_shown,
)


__all__ = [
    "CHECKS",
    "OWN_KEYS",
    "REMARKS",
    "SUPPORT_PART",
    "VERL_CHECKS",
    "Check",
    "ConfiguredPart",
    "check_by_verl",
    "demand_seams",
    "find_missing_actor",
    "find_null_sections",
    "find_unreadable_values",
    "find_unresolved_interpolations",
    "list_active",
    "list_parts",
    "list_patch_groups",
    "read_shadows",
    "read_spec",
    "substitute_usual_values",
]
