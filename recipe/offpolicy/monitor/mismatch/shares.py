"""Backend, staleness and drift as shares of the variance and of the KL divergence of log pi/mu.

Variance: share of x is Cov(x, L) / Var(L) over tokens, so that the shares of backend, staleness and drift sum to 1; one
is negative where it works against the others.

KL: k3 of what has come together so far, in the order in which it happens: backend k3(b), staleness k3(b + s) - k3(b),
drift k3(L) - k3(b + s), each over the sum of k3(L). As mu sampled the tokens, the terms estimate KL(mu, policy at
sampling in the trainer's engine), and by how much KL(mu, pi_old) and KL(mu, pi) go beyond it.

Backend of stale tokens: verl keeps no forward pass of the trainer at the weights that sampled them, so that it cannot
be seen token by token. Its mean, variance and k3 are taken from fresh tokens of the same probability, and it is taken
to be independent of staleness and drift within a bin of probability. Where too few fresh tokens are known, backend and
staleness are *not identified*, and None; their sum, the rollout's share, always is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .sums import AGES, COLUMNS, SHAPE

LEAST_TOKENS: Final = 20
"""Fresh tokens that make a bin of probability known."""
LEAST_COVERED: Final = 0.95
"""Share of stale tokens whose bin has to be known; the others take the values of the nearest known bin."""

RECENT: Final = 5
"""Earlier steps, or updates, whose fresh tokens are used for one without fresh tokens."""

_FRESH, _STALE, _UNKNOWN = (AGES.index(age) for age in ("fresh", "stale", "unknown"))
_N, _L, _LL, _G, _GG, _GL, _GK, _LK = range(len(COLUMNS))
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Shares:
    """Parts of a whole, each group of which sums to 1: rollout + routing + drift, backend + staleness + the same two.

    Attributes:
        whole: what they are shares of: a variance in nats^2, or a KL divergence in nats a token.
        rollout: of log pi_old/mu, backend and staleness together; NaN where the whole is 0.
        backend, staleness: None where not identified.
        drift: of log pi/pi_old; None where not identified.
        routing: of what the trainer's own expert routes add to the rollout engine's; None where routes are not
            replayed, or log-probs without replay are not recorded.
    """

    whole: float
    rollout: float
    backend: float | None
    staleness: float | None
    drift: float | None
    routing: float | None = None


@dataclass(frozen=True)
class BackendFloor:
    """The backend's mismatch by bin of probability, estimated from fresh tokens.

    Attributes:
        tokens: (bins,) how many.
        mean, variance, k3: (bins,) of log pi_old - log mu a token; of the nearest known bin where there are fewer than
            ``LEAST_TOKENS``.
        known: (bins,) bool.
    """

    tokens: Array
    mean: Array
    variance: Array
    k3: Array
    known: NDArray[np.bool_]

    def covered(self, tokens: Array) -> bool:
        """Return True if enough of ``tokens``, a count by bin, lies in known bins."""
        return bool(tokens[self.known].sum() >= LEAST_COVERED * tokens.sum())


def estimate_floor(sums: Array) -> BackendFloor | None:
    """Estimate the backend's floor from the fresh tokens of ``sums``, of shape SHAPE; None where no bin has enough."""
    fresh = sums[_FRESH]
    tokens = fresh[:, _N]
    known = tokens >= LEAST_TOKENS
    if not known.any():
        return None
    places = np.flatnonzero(known)
    nearest = places[np.abs(np.arange(len(tokens))[:, None] - places[None, :]).argmin(-1)]
    mean, square, k3 = (fresh[nearest, column] / tokens[nearest] for column in (_G, _GG, _GK))
    return BackendFloor(tokens, mean, np.maximum(square - mean**2, 0.0), k3, known)


def choose_floor(sums: Array, earlier: Array | None) -> tuple[BackendFloor | None, str]:
    """Choose the floor for the stale tokens of ``sums``: from its own fresh tokens, or from those of earlier steps.

    Args:
        sums, earlier: SHAPE.

    Returns:
        The floor, and where it is from: "own rows", "earlier steps", or "" where there is none.
    """
    own = estimate_floor(sums)
    stale = sums[_STALE, :, _N]
    if not stale.any() or (own is not None and own.covered(stale)):
        return own, "own rows" if own is not None else ""
    before = estimate_floor(earlier) if earlier is not None else None
    if before is not None and before.covered(stale):
        return before, "earlier steps"
    return None, ""


def compute_shares(sums: Array | Sequence[float], floor: BackendFloor | None = None) -> tuple[Shares, Shares]:
    """Compute the shares of variance and of KL.

    Args:
        sums: of ``sums.compute_sums_by_row``, summed over rows; SHAPE, or flat.
        floor: of the backend; by default that of the fresh tokens of ``sums``.
    """
    table = np.asarray(sums, dtype=np.float64).reshape(SHAPE)
    floor = floor or estimate_floor(table)
    whole = table.sum((0, 1))
    count = whole[_N]
    if not count:
        nothing = Shares(np.nan, np.nan, None, None, np.nan)
        return nothing, nothing
    stale = table[_STALE]
    identified = not table[_UNKNOWN, :, _N].any()
    fresh = table[_FRESH].sum(0)
    # Sums over tokens of b, b L and k3(b), with b the backend's part.
    backend = np.array([fresh[_G], fresh[_GL], fresh[_GK]])
    if stale[:, _N].any():
        identified = identified and floor is not None and floor.covered(stale[:, _N])
        if identified and floor is not None:
            backend += _estimate_stale_backend(stale, floor)
    mean = whole[[_L, _G]] / count
    variance = max(whole[_LL] / count - mean[0] ** 2, 0.0)
    gap_covariance = whole[_GL] / count - mean[0] * mean[1]
    backend_covariance = backend[1] / count - mean[0] * backend[0] / count
    return (
        _split(variance, gap_covariance, backend_covariance if identified else None),
        _split(whole[_LK] / count, whole[_GK] / count, backend[2] / count if identified else None),
    )


def _estimate_stale_backend(stale: Array, floor: BackendFloor) -> Array:
    """Sum b, b L and k3(b) over stale tokens; E[b L] = E[b] E[L] + Var(b) in a bin, as L - b is independent of b."""
    tokens = stale[:, _N]
    first = tokens * floor.mean
    product = floor.mean * stale[:, _L] + tokens * floor.variance
    return np.array([first.sum(), product.sum(), (tokens * floor.k3).sum()])


def _split(whole: float, rollout: float, backend: float | None) -> Shares:
    scale = 1.0 / whole if whole > 0 else np.nan
    return Shares(
        whole=float(whole),
        rollout=float(rollout * scale),
        backend=None if backend is None else float(backend * scale),
        staleness=None if backend is None else float((rollout - backend) * scale),
        drift=float((whole - rollout) * scale),
    )
