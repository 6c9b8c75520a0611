"""What the correction says about itself: bounds, ratios and orders that cannot be meant."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from ..correction import CorrectionSpec
from ..correction.mask_spec import ON_RATIO
from ..findings import Problem, set_to
from .reading import ACTOR


def bounds_without_agreement(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Bands that reject policies which agree."""
    banded = [
        (f"masks.{name}", mask.lower, mask.upper, 1 if mask.aggregate in ON_RATIO else 0) for name, mask in spec.masks
    ]
    if spec.weight is not None:
        banded.append(("weight", spec.weight.lower, spec.weight.upper, 1))
    for part, lower, upper, neutral in banded:
        key = f"correction.{part}"
        reason = f"the bounds leave out {neutral}, the value for policies that agree, where nothing is to be corrected."
        if lower is not None and lower > neutral:
            fix = f"Set {key}.lower <= {neutral}."
            yield Problem(
                f"{key}.lower", lower, reason, fix, parts=(part,), overrides=(set_to(f"{key}.lower", neutral),)
            )
        if upper is not None and upper < neutral:
            fix = f"Set {key}.upper >= {neutral}."
            yield Problem(
                f"{key}.upper", upper, reason, fix, parts=(part,), overrides=(set_to(f"{key}.upper", neutral),)
            )


def weight_beside_the_loss(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """A weight on pi / mu beside a loss with a ratio to pi of its own."""
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if spec.weight is not None and spec.weight.ratio == "full" and mode != "gpg":
        yield Problem(
            "correction.weight.ratio",
            "full",
            f"loss_mode {mode} has a ratio to the current policy of its own, which would count twice.",
            "Set actor_rollout_ref.actor.policy_loss.loss_mode=gpg, or correction.weight.ratio=rollout.",
            parts=("weight",),
            overrides=(set_to(f"{ACTOR}.policy_loss.loss_mode", "gpg"),),
        )


def order_of_skyrl(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """SkyRL's order of nothing."""
    if spec.skyrl_compat and not spec.masks:
        reason, fix = "without a mask there is no order.", "Set correction.skyrl_compat=false."
        override = set_to("correction.skyrl_compat", False)
        yield Problem("correction.skyrl_compat", True, reason, fix, "INERT", ("skyrl_compat",), (override,))
