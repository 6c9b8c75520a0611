"""The five metrics to watch in any run, with the bounds of their alarms, and what to do if a metric is outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from ...correction import CorrectionSpec, recommended
from ...correction.bounds import format_bounds
from .alarm_settings import DEFAULTS, GROWTH, SECTION, find_statistic

HEALTHY_KL: Final = 2e-3
"""Largest KL(mu, pi_old), in nats per token, between two healthy engines; dense models in 16 bits have 1e-4 to 5e-4,
and 0.0013 to 0.0016 with one engine in bfloat16 and the other in float32 (docs/evidence/real_model.md)."""
WATCHED: Final[Mapping[str, str]] = {
    GROWTH: "the engines differ or weights arrive late: record a few steps (offpolicy.record.dir) and run "
    f"recipe.offpolicy.attribute; if data is stale, bound offpolicy.staleness.eta and use {recommended.LINE}",
    "ess": "few tokens carry the gradient: find the cause of kl/k3; do not raise the cap",
    "mean_weight": "mu and pi_old are far apart: proceed as for kl/k3",
    "kept_share": "the masks reject most of the batch: check mask/*/masked_token_share, and set their bounds with "
    "recipe.offpolicy.calibrate",
    "nonfinite": "a log-prob or an advantage is NaN or infinite: find it in nonfinite/*, and fix its source",
}
"""Alarm on the metric -> what to do."""


def list_watched(spec: CorrectionSpec, alarms: Mapping[str, Any] = DEFAULTS) -> Iterator[tuple[str, str, str]]:
    """List the metrics, the healthy range of each, and what to do if a value is outside that range.

    Args:
        alarms: alarm name -> its keys as under ``offpolicy.alarms``.
    """
    for name, advice in WATCHED.items():
        metric = find_statistic(name, spec)
        bounds = format_bounds({side: alarms[name][side] for side in ("lower", "upper")})
        if name == GROWTH:
            bounds = f"{bounds} times its own median"
            bounds = f"<= {HEALTHY_KL:g} nats per token for fresh sequences, {bounds}" if metric == "kl/k3" else bounds
        yield f"offpolicy/{metric}{'/*' if name == 'nonfinite' else ''}", bounds, advice


def format_watched(spec: CorrectionSpec, config: DictConfig) -> Iterator[str]:
    """Format the lines that a run prints at its start."""
    yield "watch five metrics (details in docs/metrics.md):"
    given = OmegaConf.select(config, SECTION) or {}
    alarms = {name: {**values, **(given.get(name) or {})} for name, values in DEFAULTS.items()}
    for metric, bounds, advice in list_watched(spec, alarms):
        yield f"  {metric}: {bounds}; else {advice}"
