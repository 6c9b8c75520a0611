"""Start-up checks: whatever would leave a configured correction dead, wrong or applied twice.

Each looks at the resolved configuration and yields problems that name the key, its value and the fix. ``CHECKS`` stop a
launch; what is rarely meant and no reason to stop is one of ``REMARKS``. ``preflight.examine`` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from omegaconf import DictConfig

from ..correction import CorrectionSpec
from ..correction.problem import Problem
from ..verl_keys.reading import active
from . import agent_loops, batch_sizes, bounds, coverage, loss, path, remarks, rollout, steps, verls_own, workers_env
from .own_keys import OWN_KEYS, own_keys
from .reading import Part, parts_of, shadows_of, spec_of
from .sections import null_sections
from .values import unreadable_values, unresolved_interpolations, with_usual_values
from .verls_validation import refused_by_verl
from .workers_env import groups_of

Check = Callable[[DictConfig, CorrectionSpec], Iterator[Problem]]

OF_VERLS_OWN: tuple[Check, ...] = (
    verls_own.dead_keys,
    verls_own.thresholds,
    rollout.raw_log_probs,
    rollout.sampling,
    agent_loops.agent_loops,
    loss.base_loss_of_verls_own,
)
"""What holds of verl's own correction too, launched by verl's own program or by ours."""
CHECKS: tuple[Check, ...] = (
    path.seams,
    coverage.covered_path,
    workers_env.workers_env,
    own_keys,
    bounds.bounds_without_agreement,
    bounds.bounds_out_of_reach,
    bounds.aggregate_of_single_tokens,
    bounds.weight_beside_the_loss,
    steps.proximal,
    steps.unread_proximal,
    steps.one_gradient_step,
    path.versions,
    bounds.order_of_skyrl,
    loss.kl_clip,
    loss.denominator,
    loss.baseline,
    rollout.rollout_log_probs,
    rollout.unread_consent,
    batch_sizes.uneven_micro_batches,
    verls_own.both_at_once,
    loss.distillation,
    *OF_VERLS_OWN,
    loss.base_loss,
)
REMARKS: tuple[Check, ...] = (
    bounds.bounds_never_seen,
    remarks.level_version,
    remarks.wide_caps,
    remarks.no_staleness,
    remarks.unlike_micro_batches,
    remarks.kl_left_out,
    remarks.collapsed_rewards,
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
