"""Compiled loops over a batch on the CPU, called by ``batch_sums.CompiledBatch``.

Tokens are flat; row i extends from ``starts[i]`` to ``stops[i]``. One block of tokens at a time is gathered into
float64 scratch memory that stays in the first-level cache, and measured there by branch-free loops, which the compiler
vectorises. In blocks whose mask is 0 everywhere, nothing else is read.

The first argument of each loop, ``tokens``, is the tuple (log pi_old, log mu, mask, starts, stops). ``asked`` is the
tuple of the quantities' kinds, lower and upper bounds in float32, caps of weights, and (m, 2) clamps.

A compiled function cached on disk is not updated when other files change, so everything that it uses is in this file.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

logger = logging.getLogger(__name__)

RAW, CAPPED, BANDED, K1, K2, K3 = range(6)
_BLOCK = 256
_NEAR = 0.25
"""Largest |log ratio| for which 12 terms of the series are exact: the next term is less than 1e-17 of the sum."""
_SERIES = tuple(1 / math.factorial(k) for k in range(1, 13))
_MAGNITUDE = 2**63 - 1
"""All bits except the sign bit; if these bits are flipped in negative floats, floats can be sorted as integers."""
_LEAST, _GREATEST = int(np.float64(np.inf).view(np.int64)), int(np.float64(-np.inf).view(np.int64)) ^ _MAGNITUDE
"""Initial values of minimum and maximum: inf and -inf as integers that sort like the floats."""

_exact = njit(fastmath={"contract"}, nogil=True)
_vector = njit(fastmath={"contract", "reassoc", "nnan", "nsz"}, nogil=True)
"""Options of loops over values that are never NaN; sums may be computed in any order."""


def _kept_on_disk(function: Callable[..., None]) -> Callable[..., None]:
    """Compile on the first call with new dtypes and cache the result on disk, for all processes that share it.

    A warning reports how long the compilation took.
    """
    settings: dict[str, Any] = {"fastmath": {"contract"}, "nogil": True}
    try:
        compiled: Any = njit(cache=True, **settings)(function)
    except RuntimeError as error:  # numba found no writable folder
        logger.warning(
            "%s: every process compiles the loops again, which takes several seconds. "
            "Set NUMBA_CACHE_DIR to a writable folder.",
            error,
        )
        compiled = njit(**settings)(function)

    @functools.wraps(function)
    def call(*arguments: Any) -> None:
        known, started = len(compiled.signatures), time.perf_counter()
        compiled(*arguments)
        if len(compiled.signatures) > known and compiled.stats.cache_misses.get(compiled.signatures[-1]):
            folder = compiled.stats.cache_path
            logger.warning(
                "the loop %r was compiled for new dtypes in %.1f s; %s",
                function.__name__,
                time.perf_counter() - started,
                f"it is cached in {folder}" if folder else "it is not cached",
            )

    return call


@_exact
def _count(mask: Any) -> int:
    """Count the tokens of the mask."""
    count = 0
    for k in range(len(mask)):
        count += mask[k] != 0
    return count


@_exact
def _copy(old: Any, rollout: Any, p: Any, q: Any) -> int:
    """Copy a whole block; return the number of its finite tokens."""
    finite = 0
    for k in range(len(old)):
        p[k] = old[k]
        q[k] = rollout[k]
        finite += (abs(old[k]) < np.inf) & (abs(rollout[k]) < np.inf)
    return finite


@_exact
def _gather(old: Any, rollout: Any, mask: Any, response: int, p: Any, q: Any, where: Any) -> int:
    """Gather the valid tokens of a block and their positions in it; return their number.

    If all of its tokens are valid, this is a plain copy, without the positions.
    """
    if response == len(mask) and _copy(old, rollout, p, q) == response:
        return response
    n = 0
    for k in range(len(old)):
        p[n] = old[k]
        q[n] = rollout[k]
        where[n] = k
        n += (mask[k] != 0) & (abs(old[k]) < np.inf) & (abs(rollout[k]) < np.inf)
    return n


@_vector
def _ratios(p: Any, q: Any, n: int, clamp: float, x: Any, excess: Any) -> None:
    """Compute x = p - q and exp(x) - 1 with x clamped; near 0, use the series of exp, accurate to 1e-17."""
    s = _SERIES
    far = 0
    for k in range(n):
        d = p[k] - q[k]
        x[k] = d
        far += (d > _NEAR) | (d < -_NEAR)
        x2 = d * d
        x4 = x2 * x2
        low = (s[0] + s[1] * d) + x2 * (s[2] + s[3] * d)
        middle = (s[4] + s[5] * d) + x2 * (s[6] + s[7] * d)
        high = (s[8] + s[9] * d) + x2 * (s[10] + s[11] * d)
        excess[k] = d * (low + x4 * (middle + x4 * high))
    if far:
        for k in range(n):
            if abs(x[k]) > _NEAR:
                excess[k] = math.expm1(min(max(x[k], -clamp), clamp))


@_vector
def _moments(p: Any, q: Any, x: Any, excess: Any, n: int, k2: Any, k3: Any, sums: Any) -> None:
    """Compute k2 and k3, and add a block to the row's sums of p, q, x, k2, k3 and rho^2 - 1."""
    a = b = c = d = e = f = 0.0
    for k in range(n):
        k2[k] = 0.5 * x[k] * x[k]
        k3[k] = excess[k] - x[k]
        a += p[k]
        b += q[k]
        c += x[k]
        d += k2[k]
        e += k3[k]
        f += excess[k] * (excess[k] + 2.0)
    for k, total in enumerate((a, b, c, d, e, f)):
        sums[k] += total


@_vector
def _values(kind: int, x: Any, excess: Any, n: int, lower: Any, upper: Any, cap: float, values: Any) -> None:
    """Compute the quantity of this kind for each token."""
    if kind == RAW:
        for k in range(n):
            values[k] = excess[k] + 1.0
    elif kind == CAPPED:
        for k in range(n):
            values[k] = min(excess[k] + 1.0, cap)
    elif kind == BANDED:
        for k in range(n):
            compared = np.float32(x[k])
            values[k] = 0.0 if (compared > upper) | (compared < lower) else excess[k] + 1.0
    elif kind == K1:
        for k in range(n):
            values[k] = -x[k]
    elif kind == K2:
        for k in range(n):
            values[k] = 0.5 * x[k] * x[k]
    else:
        for k in range(n):
            values[k] = excess[k] - x[k]


@_vector
def _measure(values: Any, compared: Any, n: int, clamp: Any, about: float, lower: Any, upper: Any, sums: Any) -> None:
    """Add a block to the quantity's measures, in the order of ``batch_sums.MEASURES``, apart from the extremes."""
    a = b = c = d = 0.0
    above = below = 0
    low, high = clamp[0], clamp[1]
    for k in range(n):
        v = values[k]
        deviation = min(max(v, low), high) - about
        a += v
        b += v * v
        c += deviation
        d += deviation * deviation
    for k in range(n):
        single = np.float32(compared[k])
        above += single > upper
        below += single < lower
    sums[0] += a
    sums[1] += b
    sums[2] += c
    sums[3] += d
    sums[6] += above
    sums[7] += below


@_exact
def _extremes(values: Any, n: int, extremes: Any) -> None:
    """Track minimum and maximum as integers that sort like the floats, because integer comparisons are vectorised."""
    bits = values.view(np.int64)
    least, greatest = extremes[0], extremes[1]
    for k in range(n):
        ordered = bits[k] ^ ((bits[k] >> 63) & _MAGNITUDE)
        least = min(least, ordered)
        greatest = max(greatest, ordered)
    extremes[0], extremes[1] = least, greatest


@_kept_on_disk
def sweep(tokens: Any, clamp: float, asked: Any, ends: Any, columns: Any, measures: Any) -> None:
    """Fill ``columns`` (10, B), ``measures`` (8, m, B), and ``ends`` (B,) with the end of each row's mask."""
    old, rollout, mask, starts, stops = tokens
    kinds, lower, upper, caps, clamps = asked
    count = len(kinds)
    sums, table, extremes = np.empty(6), np.empty((count, 8)), np.empty((count + 2, 2), np.int64)
    scratch, where = np.empty((7, _BLOCK)), np.empty(_BLOCK, np.int64)
    p, q, x, excess, values = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    k2, k3 = scratch[5], scratch[6]
    for i in range(len(starts)):
        response = valid = 0
        sums[:] = 0.0
        table[:] = 0.0
        extremes[:, 0], extremes[:, 1] = _LEAST, _GREATEST
        ends[i] = starts[i]
        for start in range(starts[i], stops[i], _BLOCK):
            stop = min(start + _BLOCK, stops[i])
            masked = _count(mask[start:stop])
            if masked == 0:
                continue
            ends[i] = stop
            n = _gather(old[start:stop], rollout[start:stop], mask[start:stop], masked, p, q, where)
            response += masked
            valid += n
            _ratios(p, q, n, clamp, x, excess)
            _moments(p, q, x, excess, n, k2, k3, sums)
            _extremes(k2, n, extremes[count])
            _extremes(k3, n, extremes[count + 1])
            for m in range(count):
                is_weight = kinds[m] <= BANDED
                _values(kinds[m], x, excess, n, lower[m], upper[m], caps[m], values)
                compared, about = (x, 1.0) if is_weight else (values, 0.0)
                _measure(values, compared, n, clamps[m], about, lower[m], upper[m], table[m])
                _extremes(values, n, extremes[m])
        extremes ^= (extremes >> 63) & _MAGNITUDE
        numbers = extremes.view(np.float64)
        columns[0, i], columns[1, i] = response, valid
        columns[2:8, i] = sums
        columns[8, i], columns[9, i] = max(numbers[count, 1], 0.0), max(numbers[count + 1, 1], 0.0)
        table[:, 4:6] = numbers[:count]
        measures[:, :, i] = table.T


@_kept_on_disk
def compute_token_weights(tokens: Any, clamp: float, asked: Any, factor: float, weights: Any) -> None:
    """Fill ``weights`` (N,) on valid tokens with the only quantity asked for, divided by ``factor``."""
    old, rollout, mask, starts, stops = tokens
    kinds, lower, upper, caps, _ = asked
    scratch, where = np.empty((5, _BLOCK)), np.empty(_BLOCK, np.int64)
    p, q, x, excess, values = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    for i in range(len(starts)):
        for start in range(starts[i], stops[i], _BLOCK):
            stop = min(start + _BLOCK, stops[i])
            masked = _count(mask[start:stop])
            if masked == 0:
                continue
            n = _gather(old[start:stop], rollout[start:stop], mask[start:stop], masked, p, q, where)
            _ratios(p, q, n, clamp, x, excess)
            _values(kinds[0], x, excess, n, lower[0], upper[0], caps[0], values)
            block = weights[start:stop]
            if n == len(block):
                for k in range(n):
                    block[k] = values[k] / factor
            else:
                for k in range(n):
                    block[where[k]] = values[k] / factor


@_kept_on_disk
def spread_row_weights(tokens: Any, rows: Any, weights: Any) -> None:
    """Fill ``weights`` (N,) on valid tokens with the weight of their row, ``rows`` (B,)."""
    old, rollout, mask, starts, stops = tokens
    for i in range(len(starts)):
        row = rows[i]
        for start in range(starts[i], stops[i], _BLOCK):
            stop = min(start + _BLOCK, stops[i])
            p, q, here, block = old[start:stop], rollout[start:stop], mask[start:stop], weights[start:stop]
            if _count(here) == 0:
                continue
            for k in range(len(block)):
                valid = (here[k] != 0) & (abs(p[k]) < np.inf) & (abs(q[k]) < np.inf)
                block[k] = row if valid else 0.0


@_kept_on_disk
def apply_rejections(tokens: Any, clamp: float, rejected: Any, asked: Any, kept_mask: Any, gone: Any) -> None:
    """Fill ``kept_mask`` (N,), and ``gone`` (B,) with the number of valid tokens rejected in each row."""
    old, rollout, mask, starts, stops = tokens
    kinds, lower, upper, caps, _ = asked
    scratch = np.empty((5, _BLOCK))
    p, q, x, excess, values = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    where, drop = np.empty(_BLOCK, np.int64), np.empty(_BLOCK, np.bool_)
    for i in range(len(starts)):
        for start in range(starts[i], stops[i], _BLOCK):
            stop = min(start + _BLOCK, stops[i])
            here, block = mask[start:stop], kept_mask[start:stop]
            masked = _count(here)
            if masked == 0:
                continue
            n = _gather(old[start:stop], rollout[start:stop], here, masked, p, q, where)
            if rejected[i]:
                gone[i] += n
                continue
            drop[:n] = False
            _ratios(p, q, n, clamp, x, excess)
            for m in range(len(kinds)):
                _values(kinds[m], x, excess, n, lower[m], upper[m], caps[m], values)
                for k in range(n):
                    value = np.float32(values[k])
                    drop[k] |= (value > upper[m]) | (value < lower[m])
            gone[i] += _count(drop[:n])
            if n == len(block):
                for k in range(n):
                    block[k] = 0 if drop[k] else here[k]
            else:
                for k in range(n):
                    block[where[k]] = 0 if drop[k] else here[where[k]]
