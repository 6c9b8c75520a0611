"""Settings of the runs in one process: arms, staleness, learning rates, seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .arms import FIRST_SEED

_OPTIONS = Path(__file__).resolve().parents[3] / "configs" / "correction"
STEPS, EVERY = 80, 20
PROMPTS, ROLLOUTS, MINI_BATCHES, MAX_TOKENS = 16, 8, 4, 10
ETAS, RATES, SEEDS = (0, 1, 2, 4, 8), (1e-3, 3e-4), 10
MANTISSA, ROUNDED = 2, ("none", "decoupled", "opsm", "both")
"""Bits to which the sampler's weights are rounded where its backend is all that differs, and the arms run so."""
SECONDS = 45
"""Of a run, on one idle core."""


def _read(*names: str) -> dict[str, Any]:
    """Read shipped corrections, merged, with the delta of the whole runs."""
    merged: dict[str, Any] = {}
    for name in names:
        merged |= yaml.safe_load((_OPTIONS / f"{name}.yaml").read_text())
    if "opsm" in names:
        merged["masks"]["opsm"]["delta"] = 0.1
    return merged


ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "bypass": _read("bypass"),
    "decoupled": _read("decoupled_ppo"),
    "opsm": _read("opsm"),
    "both": _read("decoupled_ppo", "opsm"),
    "random": _read("opsm"),
}
"""Arm -> its correction; ``random`` drops as many negative rows as OPSM would, others."""


@dataclass(frozen=True)
class LateRun:
    """One run.

    Attributes:
        arm: of ``ARMS``.
        eta: steps by which the sampler's weights are late.
        rate: learning rate.
        seed: of questions, of their order, and of sampling.
        rounded: the sampler holds its weights with ``MANTISSA`` bits of mantissa, an engine of another precision.
    """

    arm: str
    eta: int
    rate: float
    seed: int
    rounded: bool = False

    @property
    def setting(self) -> str:
        """The name of arm, eta and rate."""
        return f"{self.arm}-{self.eta}-{self.rate:g}" + "-rounded" * self.rounded

    @property
    def name(self) -> str:
        return f"{self.setting}-{self.seed}"


def list_late_runs() -> Iterator[LateRun]:
    """List all runs seed by seed; rounded samplers are in step."""
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        yield from (LateRun(arm, 0, RATES[0], seed, rounded=True) for arm in ROUNDED)
        for rate in RATES:
            for eta in reversed(ETAS):
                yield from (LateRun(arm, eta, rate, seed) for arm in ARMS)
