"""Sample of the steps that a report reads: all of a short recording, evenly spread ones of a long one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...recording import Recording
from ..attribution.row_sample import BYTES_A_TOKEN

TIMELINE = 200
"""Steps that are read for what is drawn over time."""
STUDIED = 24
"""Steps that are read again for attribution, calibration and what-if."""
TOKENS = 4_000_000
"""Tokens that these steps may have together, estimated by the size of their files; one step is always read."""


@dataclass(frozen=True)
class StepSample:
    """The steps that a report reads.

    Attributes:
        recorded: how many steps there are.
        first, last: of them.
        timeline: read for what is drawn over time.
        studied: read for everything else, some of ``timeline``.
    """

    recorded: int
    first: int
    last: int
    timeline: tuple[int, ...]
    studied: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """The sentence about the sample."""
        if len(self.studied) == self.recorded:
            steps = "the one recorded step" if self.recorded == 1 else f"all {self.recorded} recorded steps"
            return f"Read: {steps} ({self.first} to {self.last})."
        drawn = "all of them" if len(self.timeline) == self.recorded else f"{len(self.timeline)} of them, evenly spread"
        return (
            f"{self.recorded} steps are recorded ({self.first} to {self.last}). What is drawn over time reads {drawn}; "
            f"attribution, calibration and what-if read {len(self.studied)} steps, evenly spread: "
            f"{', '.join(map(str, self.studied))}."
        )


def sample_steps(
    recording: Recording, *, timeline: int = TIMELINE, studied: int = STUDIED, tokens: int = TOKENS
) -> StepSample:
    """Sample the first step, the last, and steps between them."""
    steps = recording.steps
    over_time = spread_evenly(steps, timeline)
    most = count_steps_of(recording, over_time, tokens)
    return StepSample(len(steps), steps[0], steps[-1], over_time, spread_evenly(over_time, min(studied, most)))


def count_steps_of(recording: Recording, steps: Sequence[int], tokens: int) -> int:
    """Count how many steps of the mean size of ``steps`` have so many tokens together, at least one."""
    # File size stands for tokens, so that no file is read to choose.
    size = sum(path.stat().st_size for step in steps for path in recording.files[step]) / len(steps)
    return max(int(tokens * BYTES_A_TOKEN // max(size, 1)), 1)


def spread_evenly(steps: Sequence[int], most: int) -> tuple[int, ...]:
    """Choose at most ``most`` of ``steps``, evenly, always the last, and the first where there are two."""
    if len(steps) <= most:
        return tuple(steps)
    if most == 1:
        return (steps[-1],)
    return tuple(steps[place] for place in np.linspace(0, len(steps) - 1, most).round().astype(int))
