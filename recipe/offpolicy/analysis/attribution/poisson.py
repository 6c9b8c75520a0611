"""Poisson variables of mean 1, how often each row is in a bootstrap draw."""

from __future__ import annotations

import itertools
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

_UNIFORM: Final = 2**32
"""Values of the uniform variable that is inverted."""


def _compute_bounds() -> list[int]:
    """Compute the uniform values from which a variable is 1, 2, ...: its distribution function, scaled and rounded."""
    terms = (math.exp(-1) / math.factorial(k) for k in itertools.count())
    scaled = (round(_UNIFORM * total) for total in itertools.accumulate(terms))
    return list(itertools.takewhile(lambda bound: bound < _UNIFORM, scaled))


BOUNDS: Final = tuple(_compute_bounds())


def draw_poisson(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Draw Poisson variables of mean 1, in an array of this shape, each value with its probability to 2^-32.

    By inversion of the distribution function; numpy's own draws, of any mean, take several times as long.
    """
    uniform = random.integers(0, _UNIFORM, shape, dtype=np.uint32)
    counts = np.zeros(shape, dtype=np.uint8)
    for bound in BOUNDS:
        counts += uniform >= np.uint32(bound)
    return counts.astype(np.float64)
