"""Share of rows that a sequence mask keeps, by length: in closed form, and as the shipped mask decides."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from recipe.offpolicy.correction import CorrectionSpec, rollout_stage

LENGTHS = (10, 100, 1000, 4000)
MASKS = {"geometric": (0.99, 1.01), "product": (0.5, 2.0)}
"""Aggregate and bounds on the ratio."""
CHUNK = 1_000_000  # simulated tokens held at a time


@dataclass(frozen=True)
class LogRatio:
    """Independent normal log pi_old - log mu a token, in nats."""

    name: str
    mean: float
    deviation: float


CASES = (
    LogRatio("noise 0.03", 0.0, 0.03),
    # Tokens that mu sampled have E[rho] = 1, so that the mean of log rho is -s^2 / 2 and not 0.
    LogRatio("noise 0.03, E[rho] = 1", -(0.03**2) / 2, 0.03),
    LogRatio("drift 0.001", 0.001, 0.0),
    LogRatio("drift 0.02", 0.02, 0.0),
)


def expected(aggregate: str, case: LogRatio, length: int) -> float:
    """Compute the probability that a row is kept: the mean is N(m, s^2 / T), the sum N(m T, s^2 T)."""
    times, root = (1.0, 1 / math.sqrt(length)) if aggregate == "geometric" else (float(length), math.sqrt(length))
    lower, upper = (math.log(bound) for bound in MASKS[aggregate])
    centre, spread = case.mean * times, case.deviation * root
    if spread == 0:
        return float(lower <= centre <= upper)
    return _normal_cdf((upper - centre) / spread) - _normal_cdf((lower - centre) / spread)


def simulated(aggregate: str, case: LogRatio, length: int, *, rows: int, seed: int) -> float:
    """Compute the share of ``rows`` random rows that the shipped mask keeps."""
    lower, upper = MASKS[aggregate]
    mask = {"ratio": "rollout", "level": "sequence", "aggregate": aggregate, "when": "any"}
    spec = CorrectionSpec.from_mapping({"masks": {"mask": mask | {"lower": lower, "upper": upper}}})
    generator = torch.Generator().manual_seed(seed)
    kept, left = 0, rows
    while left:
        count = min(left, max(1, CHUNK // length))
        log_ratio = case.mean + case.deviation * torch.randn(count, length, generator=generator, dtype=torch.float64)
        mu = torch.full_like(log_ratio, -1.0)
        stage = rollout_stage(
            spec, old_log_prob=mu + log_ratio, rollout_log_prob=mu, response_mask=torch.ones_like(mu, dtype=torch.bool)
        )
        kept += int(stage.keep.all(-1).sum())
        left -= count
    return kept / rows


def _normal_cdf(value: float) -> float:
    return math.erfc(-value / math.sqrt(2)) / 2
