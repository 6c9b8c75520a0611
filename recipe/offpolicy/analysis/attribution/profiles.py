"""Mismatch profiles: log pi_old/mu and log pi/pi_old by position, length, probability, turn and staleness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from ...monitor.mismatch.sums import BINS
from .frames import PROFILES, SIZES, merge


@dataclass(frozen=True)
class Bucket:
    """Mismatch of the tokens in one bucket of a profile.

    Attributes:
        name: value or range that the tokens share.
        mean, std: of log pi_old - log mu, nats.
        k3: KL(mu, pi_old), nats a token.
        share: of the sum of k3 over all tokens; NaN where that is 0.
        drift_std: of log pi - log pi_old, nats; NaN where not identified.
    """

    name: str
    tokens: int
    mean: float
    std: float
    k3: float
    share: float
    drift_std: float


def build_profiles(cells: pl.DataFrame) -> dict[str, list[Bucket]]:
    """Build each profile from cells by all of them: its name -> its buckets that hold a token, in order."""
    starts = (1, *(edge + 1 for edge in SIZES))
    sizes = [f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, SIZES, strict=False)] + [f"> {SIZES[-1]}"]
    labels = {"position": sizes, "length": sizes, "probability": BINS}
    whole = cells["gap_k3"].sum()

    def build(name: str, each: Mapping[str, Any]) -> Bucket:
        value, tokens = each[name], each["tokens"]
        unknown = name == "staleness" and value < 0
        return Bucket(
            name=labels[name][value] if name in labels else "unknown" if unknown else str(value),
            tokens=int(tokens),
            mean=each["gap"] / tokens,
            std=math.sqrt(each["gap_spread"] / tokens),
            k3=each["gap_k3"] / tokens,
            share=each["gap_k3"] / whole if whole > 0 else math.nan,
            drift_std=math.sqrt(each["drift_spread"] / tokens),
        )

    return {
        name: [build(name, each) for each in merge(cells, name).sort(name).iter_rows(named=True)] for name in PROFILES
    }


def clear_drift_std(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets with ``drift_std`` NaN, for rows whose drift is not identified."""
    return [replace(bucket, drift_std=float("nan")) for bucket in buckets]
