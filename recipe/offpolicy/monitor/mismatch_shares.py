"""Backend, staleness and drift as shares of the variance and of the KL divergence of log pi/mu.

Per token, in nats: total L = log pi - log mu, gap G = log pi_old - log mu, drift L - G. A token is *fresh* if the
weights at the start of its step sampled it; its G is then the backend's part. In a *stale* token, G is the sum of
backend and staleness, which can be separated only with fresh tokens of the same probability.

Variance: the share of x is Cov(x, L) / Var(L) over tokens, so the shares of backend, staleness and drift sum to 1; a
share is negative if its part reduces the total.

KL: k3 of the accumulated parts, in the order in which they occur: backend k3(b), staleness k3(b + s) - k3(b), drift
k3(L) - k3(b + s), each divided by the sum of k3(L). Because mu sampled the tokens, the terms estimate KL(mu, policy at
sampling in the trainer's engine), the increase from that value to KL(mu, pi_old), and the further increase to KL(mu,
pi).

Backend of stale tokens: verl does not run the trainer's forward pass with the weights that sampled these tokens, so the
backend's part is not observed per token. Its mean, variance and k3 are taken from fresh tokens of the same probability.
Within a bin of probability, the backend's part is assumed to be independent of staleness and drift. With too few fresh
tokens, backend and staleness are *not identified* and are None; their sum, the rollout's share, is always identified.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..correction.ratios import compute_divergence
from ..correction.statistics import DeferredValue, Reduction, Statistic
from ..proof.rewards import ROUNDING

EDGES: Final = (-6.907755278982137, -4.605170185988091, -2.302585092994046, -0.6931471805599453, -0.10536051565782628)
"""Upper edges of the bins of probability, as log mu: 0.001, 0.01, 0.1, 0.5, 0.9."""
BINS: Final = ("< 0.001", "0.001-0.01", "0.01-0.1", "0.1-0.5", "0.5-0.9", "> 0.9")
"""Probability under mu, by bin; mu is used because it is closer than pi_old to the weights that sampled a stale
token."""

AGES: Final = ("fresh", "stale", "unknown")
COLUMNS: Final = ("tokens", "total", "total_square", "gap", "gap_square", "gap_total", "gap_k3", "total_k3")
"""n, sum L, sum L^2, sum G, sum G^2, sum G L, sum k3(G), sum k3(L), with k3(x) = exp(x) - 1 - x."""
SHAPE: Final = (len(AGES), len(BINS), len(COLUMNS))


@torch.no_grad()
def compute_sums_by_row(
    rollout_log_prob: Tensor,
    old_log_prob: Tensor,
    log_prob: Tensor,
    response_mask: Tensor,
    staleness: Tensor | None,
) -> Tensor:
    """Compute the sums of each row.

    Args:
        rollout_log_prob, old_log_prob, log_prob: (B, T) log mu, log pi_old, log pi, any float dtype.
        response_mask: (B, T) bool or 0/1; a token with a log-prob that is not finite is excluded.
        staleness: (B,) integers, or (B, T) per token, number of steps from the weights used for sampling to the weights
            at the start of the step, negative if unknown; None: unknown for all rows.

    Returns:
        (B, *SHAPE) float64.
    """
    mu = rollout_log_prob.detach().double()
    differences = torch.stack((log_prob.detach() - mu, old_log_prob.detach() - mu))
    # Both ratios are finite if all three log-probs are. A number minus itself is 0 only if the number is finite.
    valid = response_mask.bool() & (differences - differences == 0).all(0)
    differences = torch.where(valid, differences, 0.0)
    squares, k3 = differences.square(), compute_divergence("k3", differences)
    total, gap = differences.unbind()
    columns = torch.stack(
        [valid.double(), total, squares[0], gap, squares[1], gap * total, k3[1], k3[0]],
        dim=-1,
    )
    rows, ages, bins, width = len(valid), *SHAPE
    # Where tokens are not valid, columns are 0, so the bin of these tokens does not matter.
    place = torch.bucketize(mu, _edges(valid.device), right=True)
    if staleness is None:
        age = torch.full((rows, 1), AGES.index("unknown"), device=valid.device)
    else:
        known = staleness.to(valid.device).reshape(rows, -1)
        age = torch.where(known < 0, AGES.index("unknown"), (known > 0).long())
    place = place + bins * (age + ages * torch.arange(rows, device=valid.device)[:, None])
    sums = torch.zeros(rows * ages * bins, width, dtype=torch.float64, device=valid.device)
    sums.index_add_(0, place.flatten(), columns.reshape(-1, width))
    return sums.reshape(rows, *SHAPE)


@cache
def _edges(device: torch.device) -> Tensor:
    return torch.tensor(EDGES, dtype=torch.float64, device=device)


LEAST_TOKENS: Final = 20
"""Minimum number of fresh tokens for a bin of probability to count as known."""
LEAST_COVERED: Final = 0.95
"""Share of stale tokens that must be in known bins; tokens in other bins use the values of the nearest known bin."""

RECENT: Final = 5
"""Number of earlier steps, or updates, whose fresh tokens are used if the current step or update has none."""

_FRESH, _STALE, _UNKNOWN = (AGES.index(age) for age in ("fresh", "stale", "unknown"))
_N, _L, _LL, _G, _GG, _GL, _GK, _LK = range(len(COLUMNS))
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Shares:
    """Parts of a whole, in groups that sum to 1: rollout + routing + drift, backend + staleness + routing + drift.

    Attributes:
        whole: the quantity that is split: a variance in nats^2, or a KL divergence in nats per token.
        rollout: share of log pi_old/mu, backend and staleness together; NaN if the whole is 0.
        backend, staleness: None if not identified.
        drift: share of log pi/pi_old; None if not identified.
        routing: share due to the difference between the trainer's own expert routes and those of the rollout engine;
            None if routes are not replayed, or log-probs without replay are not recorded.
    """

    whole: float
    rollout: float
    backend: float | None
    staleness: float | None
    drift: float | None
    routing: float | None = None


@dataclass(frozen=True)
class BackendFloor:
    """The backend's mismatch by bin of probability, estimated from fresh tokens; (..., bins) each.

    Attributes:
        tokens: number of fresh tokens.
        mean, variance, k3: those of log pi_old - log mu, per token; if there are fewer than ``LEAST_TOKENS``, they are
            taken from the nearest known bin, and are undefined if no bin is known.
        known: bool.
    """

    tokens: Array
    mean: Array
    variance: Array
    k3: Array
    known: NDArray[np.bool_]

    def covered(self, tokens: Array) -> NDArray[np.bool_]:
        """Return, as (...) bool, whether enough of each table's ``tokens``, counted by bin, are in known bins."""
        inside = np.where(self.known, tokens, 0.0).sum(-1)
        return self.known.any(-1) & (inside >= LEAST_COVERED * tokens.sum(-1))


def estimate_floor(sums: Array) -> BackendFloor | None:
    """Estimate the backend's floor from the fresh tokens of ``sums``, SHAPE; None if no bin has enough tokens."""
    floor = _measure_floor(sums)
    return floor if floor.known.any() else None


def _measure_floor(sums: Array) -> BackendFloor:
    """Measure the floor of each table, (..., *SHAPE)."""
    fresh = sums[..., _FRESH, :, :]
    tokens = fresh[..., _N]
    known = tokens >= LEAST_TOKENS
    bins = np.arange(tokens.shape[-1])
    apart = np.where(known[..., None, :], np.abs(bins[:, None] - bins), len(bins))
    nearest = apart.argmin(-1)
    count = np.maximum(np.take_along_axis(tokens, nearest, -1), 1.0)
    mean, square, k3 = (np.take_along_axis(fresh[..., column], nearest, -1) / count for column in (_G, _GG, _GK))
    return BackendFloor(tokens, mean, np.maximum(square - mean**2, 0.0), k3, known)


def choose_floor(sums: Array, earlier: Array | None) -> tuple[BackendFloor | None, str]:
    """Choose the floor for the stale tokens of ``sums``: from its own fresh tokens, or from those of earlier steps.

    Args:
        sums, earlier: SHAPE.

    Returns:
        The floor, and its source: "own rows", "earlier steps", or "" if there is none.
    """
    stale = sums[_STALE, :, _N]
    own = estimate_floor(sums)
    if own is not None and (not stale.any() or own.covered(stale)):
        return own, "own rows"
    before = None if earlier is None else estimate_floor(earlier)
    if before is not None and stale.any() and before.covered(stale):
        return before, "earlier steps"
    return None, ""


def compute_shares(sums: Array | Sequence[float], floor: BackendFloor | None = None) -> tuple[Shares, Shares]:
    """Compute the shares of variance and of KL.

    Args:
        sums: result of ``compute_sums_by_row``, summed over rows; SHAPE, or flat.
        floor: the backend's floor; by default, it is estimated from the fresh tokens of ``sums``.
    """
    *splits, identified = compute_many_shares(np.asarray(sums, dtype=np.float64).reshape(SHAPE), floor)
    unknown: dict[str, Any] = {} if identified else {"backend": None, "staleness": None}
    of_variance, of_kl = (Shares(**{name: float(part) for name, part in split.items()} | unknown) for split in splits)
    return of_variance, of_kl


def compute_many_shares(
    tables: Array, floor: BackendFloor | None = None
) -> tuple[dict[str, Array], dict[str, Array], NDArray[np.bool_]]:
    """Compute the shares of variance and of KL of each table.

    Returns:
        Field of ``Shares`` -> (...), for variance and for KL, NaN where a table has no token; and whether backend and
        staleness could be separated. Both are NaN where they could not.

    Args:
        tables: (..., *SHAPE), see ``compute_shares``.
        floor: the backend's floor, the same for all tables; by default, it is estimated from each table's fresh tokens.
    """
    floor = floor or _measure_floor(tables)
    whole, fresh = tables.sum((-3, -2)), tables[..., _FRESH, :, :].sum(-2)
    stale = tables[..., _STALE, :, :]
    aged = stale[..., _N].any(-1)
    some = whole[..., _N] > 0
    count = np.where(some, whole[..., _N], np.nan)
    identified = some & ~tables[..., _UNKNOWN, :, _N].any(-1) & (~aged | floor.covered(stale[..., _N]))
    # Sums over tokens of b, b L and k3(b), where b is the backend's part.
    backend = fresh[..., [_G, _GL, _GK]] + np.where((identified & aged)[..., None], _estimate_stale(stale, floor), 0.0)
    backend = np.where(identified[..., None], backend, np.nan)
    total, gap = whole[..., _L] / count, whole[..., _G] / count
    square = whole[..., _LL] / count
    variance = square - total**2
    # Log-ratios that are equal up to rounding have no variance to split.
    variance = np.where(variance <= ROUNDING**2 * square, 0.0, variance)
    gap_covariance = whole[..., _GL] / count - total * gap
    backend_covariance = backend[..., 1] / count - total * backend[..., 0] / count
    return (
        _split(variance, gap_covariance, backend_covariance),
        _split(whole[..., _LK] / count, whole[..., _GK] / count, backend[..., 2] / count),
        identified,
    )


def _estimate_stale(stale: Array, floor: BackendFloor) -> Array:
    """Sum b, b L and k3(b) over stale tokens; E[b L] = E[b] E[L] + Var(b) in a bin, as L - b is independent of b."""
    tokens = stale[..., _N]
    first = tokens * floor.mean
    product = floor.mean * stale[..., _L] + tokens * floor.variance
    return np.stack([first.sum(-1), product.sum(-1), (tokens * floor.k3).sum(-1)], axis=-1)


def _split(whole: Array, rollout: Array, backend: Array) -> dict[str, Array]:
    scale = np.divide(1.0, whole, out=np.full_like(whole, np.nan), where=whole > 0)
    parts = {"rollout": rollout, "backend": backend, "staleness": rollout - backend, "drift": whole - rollout}
    return {"whole": whole} | {name: part * scale for name, part in parts.items()}


PARTS: Final = ("rollout", "backend", "staleness", "drift")
SHARES: Final = tuple(f"attribution/{whole}_share/{part}" for whole in ("variance", "kl") for part in PARTS)


def _name_shares(of_variance: Shares, of_kl: Shares) -> dict[str, float]:
    """Name the shares as in ``SHARES``; NaN for a share that is None."""
    values = [getattr(split, part) for split in (of_variance, of_kl) for part in PARTS]
    return {name: math.nan if share is None else share for name, share in zip(SHARES, values, strict=True)}


@dataclass(frozen=True)
class ShareStatistic(Statistic):
    """Share of the variance or of the KL, computed from the flattened results of ``compute_sums_by_row``.

    Attributes:
        name: name of the share.
    """

    name: str = ""

    def value(self) -> float:
        """Compute the share; NaN if it is not identified or if the whole is 0."""
        return _name_shares(*compute_shares([float(part) for part in self.parts]))[self.name]


def build_share_statistics(sums: Sequence[float]) -> dict[str, Statistic]:
    """Build the statistics that ``_name_shares`` names.

    Args:
        sums: result of ``compute_sums_by_row``, summed over rows, flat, already on the host.
    """
    return {name: ShareStatistic(Reduction.SUM, tuple(sums), name=name) for name in SHARES}


def defer_share_statistics(
    *,
    rollout_log_prob: Tensor,
    old_log_prob: Tensor,
    log_prob: Tensor,
    response_mask: Tensor,
    staleness: Tensor | None,
) -> DeferredValue[dict[str, Statistic]]:
    """Compute the share statistics of some rows on the device; arguments as in ``compute_sums_by_row``.

    Staleness must be None if pi_old was not computed by a forward pass with the weights at the start of the step. In
    that case, the backend cannot be separated from the rest.
    """
    sums = compute_sums_by_row(rollout_log_prob, old_log_prob, log_prob, response_mask, staleness)
    return DeferredValue(sums.sum(0).flatten(), build_share_statistics)


class RecentFloor:
    """Sums of the last ``RECENT`` updates, one small table each."""

    def __init__(self) -> None:
        self._tables: deque[Array] = deque(maxlen=RECENT)

    def add(self, statistics: Mapping[str, Statistic]) -> None:
        """Add the sums of one update."""
        self._tables.extend(_read_sums(statistics))

    def compute_shares(self, statistics: Mapping[str, Statistic]) -> dict[str, float]:
        """Compute the values of ``build_share_statistics``; NaN for a share that earlier updates do not identify."""
        for table in _read_sums(statistics):
            floor, _ = choose_floor(table, np.sum(self._tables, axis=0) if self._tables else None)
            return _name_shares(*compute_shares(table, floor))
        return {}


def _read_sums(statistics: Mapping[str, Statistic]) -> list[Array]:
    """Read the table of sums, which all share statistics have in common; empty if there are none."""
    shares = [each for each in statistics.values() if isinstance(each, ShareStatistic)]
    return [np.array([float(part) for part in each.parts]).reshape(SHAPE) for each in shares[:1]]
