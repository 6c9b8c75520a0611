"""A weight whose cap follows an ESS, its configuration, and the histograms of one update."""

from __future__ import annotations

import math
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, Statistic
from recipe.offpolicy.correction.spec import WEIGHT, Side
from recipe.offpolicy.correction.statistics import fetch
from recipe.offpolicy.monitor.moving_bounds import defer_histograms
from tests.support.applications import CONFIGS
from tests.support.corrections import TIS, spec

CAPPED = spec(weight=TIS)
SPREAD = [0.0, 0.0, 0.0, math.log(3.0)] * 5
"""The ESS is 0.9 with a cap of 1.95325, see ``test_cap.test_the_cap_of_four_tokens_by_hand``."""


def config(correction: CorrectionSpec, **values: Any) -> DictConfig:
    shipped: Any = OmegaConf.load(CONFIGS / "offpolicy_base.yaml")
    calibrate = OmegaConf.merge(shipped.offpolicy.calibrate, {"target_ess": 0.9, "warmup": 1} | values)
    return OmegaConf.create({"offpolicy": {"calibrate": calibrate}, "correction": correction.to_mapping()})


def seen(log_rho: list[float], correction: CorrectionSpec = CAPPED, **sides: Any) -> dict[str, Statistic]:
    """One update with rows of one token each, with these log-ratios."""
    old = torch.tensor(log_rho, dtype=torch.float64)[:, None]
    ones = torch.ones_like(old)
    moving: dict[str, Side] = {WEIGHT: "upper", **sides}
    reading = defer_histograms(
        correction,
        moving,
        old_log_prob=old,
        rollout_log_prob=0 * ones,
        log_prob=old,
        response_mask=ones.bool(),
        advantages=ones,
    )
    return dict(fetch([reading])[0])
