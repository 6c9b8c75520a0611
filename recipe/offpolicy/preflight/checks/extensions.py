"""Checks of extensions: problems around their settings, and needs that they have together."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from ...correction import CorrectionSpec
from ...correction.problem import Problem, set_to
from ...extensions.extension import Extension
from ...extensions.registry import load_extensions
from .config_reader import ROLLOUT

_MU = f"{ROLLOUT}.calculate_log_probs"


def warn_extensions(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Pass on the problems of extensions that stop nothing."""
    for extension in load_extensions(config):
        yield from (problem for problem in extension.problems(config) if problem.verdict != "ERROR")


def check_extensions(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check the extensions that are on, and what they need of the run together."""
    found = load_extensions(config)
    for extension in found:
        yield from (problem for problem in extension.problems(config) if problem.verdict == "ERROR")
    estimating = [each.section for each in found if type(each).estimate is not Extension.estimate]
    for section in estimating[1:]:
        reason = f"it computes advantages in the place of verl's estimator, and so does {estimating[0]}."
        yield Problem(section, "on", reason, f"Set {section}=null, or {estimating[0]}=null.", parts=(section,))
    needy = [each.section for each in found if each.worker() is not None]
    if needy and not OmegaConf.select(config, _MU):
        reason = f"the workers read the rollout's log-probs where {needy[0]} acts on the loss."
        override = set_to(_MU, True)
        yield Problem(_MU, False, reason, f"Set {override}.", parts=tuple(needy), overrides=(override,))
