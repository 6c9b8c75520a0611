"""Start-up checks: whatever would leave a configured correction dead, wrong or applied twice.

Each looks at the resolved configuration and yields problems that name the key, its value and the fix. ``CHECKS`` stop a
launch; what is rarely meant and no reason to stop is one of ``REMARKS``. ``preflight.examine`` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from omegaconf import DictConfig

from ...correction import CorrectionSpec
from ...correction.problem import Problem
from ..verl_keys.keys import active
from . import (
    agent_loops,
    batch_sizes,
    bounds,
    coverage,
    extensions,
    gradient_steps,
    loss,
    rollout,
    runtime_env,
    seams,
    verl_rollout_correction,
    warnings,
)
from .config_reader import Part, parts_of, shadows_of, spec_of
from .null_sections import null_sections
from .offpolicy_keys import OWN_KEYS, own_keys
from .runtime_env import groups_of
from .values import unreadable_values, unresolved_interpolations, with_usual_values
from .verl_validate_config import refused_by_verl

Check = Callable[[DictConfig, CorrectionSpec], Iterator[Problem]]

OF_VERLS_OWN: tuple[Check, ...] = (
    verl_rollout_correction.dead_keys,
    verl_rollout_correction.thresholds,
    rollout.raw_log_probs,
    rollout.sampling,
    agent_loops.agent_loops,
    loss.base_loss_of_verls_own,
)
"""What holds of verl's own correction too, launched by verl's own program or by ours."""
CHECKS: tuple[Check, ...] = (
    seams.seams,
    coverage.covered_path,
    runtime_env.workers_env,
    own_keys,
    bounds.bounds_without_agreement,
    bounds.bounds_out_of_reach,
    bounds.aggregate_of_single_tokens,
    bounds.weight_beside_the_loss,
    gradient_steps.proximal,
    gradient_steps.unread_proximal,
    gradient_steps.one_gradient_step,
    seams.versions,
    bounds.order_of_skyrl,
    loss.kl_clip,
    loss.denominator,
    loss.baseline,
    rollout.rollout_log_probs,
    rollout.unread_consent,
    batch_sizes.uneven_micro_batches,
    verl_rollout_correction.both_at_once,
    loss.distillation,
    *OF_VERLS_OWN,
    loss.base_loss,
    extensions.extensions,
)
REMARKS: tuple[Check, ...] = (
    bounds.bounds_never_seen,
    warnings.level_version,
    warnings.wide_caps,
    warnings.no_staleness,
    warnings.unlike_micro_batches,
    warnings.kl_left_out,
    warnings.collapsed_rewards,
    extensions.remarks,
)


__all__ = [
    "CHECKS",
    "OF_VERLS_OWN",
    "OWN_KEYS",
    "REMARKS",
    "Check",
    "Part",
    "active",
    "groups_of",
    "null_sections",
    "parts_of",
    "refused_by_verl",
    "shadows_of",
    "spec_of",
    "unreadable_values",
    "unresolved_interpolations",
    "with_usual_values",
]
