"""Start-up checks: whatever would leave a configured correction dead, wrong or applied twice stops the run.

One set for the launch, ``--check``, the doctor and the test of a fork. Each check looks at the resolved configuration
and yields problems that name the key, its value and the fix. What is rarely meant and no reason to stop is a remark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from omegaconf import DictConfig

from ..correction import CorrectionSpec, SpecError
from ..findings import Problem
from . import bounds, loss, path, remarks, rollout, steps, verls_own, workers_env
from .own_keys import OWN_KEYS, own_keys
from .reading import CheckError, Part, parts_of, shadows_of, spec_of
from .sections import null_sections, refuse_null_sections
from .verls_own import verl_correction_changes
from .verls_validation import refused_by_verl
from .workers_env import groups_of

Check = Callable[[DictConfig, CorrectionSpec], Iterator[Problem]]

OF_VERLS_OWN: tuple[Check, ...] = (
    verls_own.dead_keys,
    verls_own.thresholds,
    rollout.raw_log_probs,
    rollout.sampling,
    loss.base_loss_of_verls_own,
)
"""What holds of verl's own correction too, launched by verl's own program or by ours."""
CHECKS: tuple[Check, ...] = (
    path.seams,
    path.path,
    workers_env.workers_env,
    own_keys,
    bounds.bounds_without_agreement,
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
    verls_own.both_at_once,
    loss.distillation,
    *OF_VERLS_OWN,
    loss.base_loss,
)
REMARKS: tuple[Check, ...] = (
    remarks.level_version,
    remarks.wide_caps,
    remarks.no_staleness,
    remarks.unlike_micro_batches,
    remarks.kl_left_out,
    remarks.collapsed_rewards,
)


def run_checks(config: DictConfig) -> CorrectionSpec:
    """Run every check.

    Returns:
        The correction to train with.

    Raises:
        SpecError: the correction itself is malformed.
        CheckError: something around it makes it dead, wrong or double; all problems at once.
    """
    spec = spec_of(config)
    problems = found_by(CHECKS, config, spec)
    if problems:
        raise CheckError(problems)
    return spec


def advice(config: DictConfig, spec: CorrectionSpec) -> list[str]:
    """What is allowed and rarely meant."""
    return [str(problem) for problem in found_by(REMARKS, config, spec)]


def found_by(checks: tuple[Check, ...], config: DictConfig, spec: CorrectionSpec) -> list[Problem]:
    """The problems that these checks find, in their order."""
    return [problem for check in checks for problem in check(config, spec)]


__all__ = [
    "CHECKS",
    "OF_VERLS_OWN",
    "OWN_KEYS",
    "REMARKS",
    "CheckError",
    "Part",
    "Problem",
    "SpecError",
    "advice",
    "found_by",
    "groups_of",
    "null_sections",
    "parts_of",
    "refuse_null_sections",
    "refused_by_verl",
    "run_checks",
    "shadows_of",
    "spec_of",
    "verl_correction_changes",
]
