"""Trainer side of the proof that the support was replayed: judges the workers' reports of each update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..proof.verify import LivenessError
from .support_settings import SupportSettings
from .support_tally import SupportReport

WORSE = 1.1
"""Largest accepted ratio of k3 over the support to k3 over the vocabulary."""
_ROUNDING = 1e-6
"""k3 per token of two engines that agree, up to rounding."""


@dataclass(frozen=True)
class SupportVerdict:
    """The verdict on one update.

    Attributes:
        metrics: metrics, named below ``offpolicy/support/``.
        proof: a sentence.
    """

    metrics: dict[str, float]
    proof: str


def judge(reports: Sequence[SupportReport], settings: SupportSettings, *, first: bool) -> SupportVerdict:
    """Judge the reports of one update, one per mini-batch and rank.

    Args:
        first: the first update of the run, in which the support must not increase k3(mu, pi).

    Raises:
        LivenessError: nothing was replayed, or replay widens the mismatch.
    """
    if not reports:
        raise LivenessError(
            "correction.support=engine: the update returned no report, so no support was replayed. "
            "The run uses another worker or engine than the one that replays."
        )
    tokens, known = (sum(getattr(each, name) for each in reports) for name in ("tokens", "known"))
    if tokens and not known:
        raise LivenessError(
            f"correction.support=engine: none of {tokens} tokens has a support of at most {settings.size} ids. "
            f"Fix: raise correction.support_size, or set correction.support=null."
        )
    k3, without = (math.fsum(getattr(each, name) for each in reports) for name in ("k3", "k3_without"))
    compared = sum(each.k3_tokens for each in reports)
    unknown = tokens - known
    size = sum(each.bytes for each in reports)
    metrics = {
        "unknown_token_share": unknown / tokens if tokens else math.nan,
        "size": sum(each.members for each in reports) / known if known else math.nan,
        "size_largest": float(max(each.largest for each in reports)),
        "mass_least": min(each.least_mass for each in reports),
        "unknown_mass": math.fsum(each.unknown_mass for each in reports) / unknown if unknown else math.nan,
        "bytes": float(size),
        "bytes_a_token": size / tokens if tokens else math.nan,
        "kl_k3": k3 / compared if compared else math.nan,
        "kl_k3_without": without / compared if compared else math.nan,
    }
    if first and k3 > WORSE * without + _ROUNDING * compared:
        raise LivenessError(
            f"correction.support=engine: KL(mu, pi) by k3 is {metrics['kl_k3']:.2e} over the support and "
            f"{metrics['kl_k3_without']:.2e} over the vocabulary, so mu was not sampled from this support. "
            f"Fix: run the same model in rollout and trainer, or set correction.support=null."
        )
    rows = sum(each.compared for each in reports)
    return SupportVerdict(
        metrics,
        f"support of {known / tokens if tokens else 0.0:.1%} of tokens LIVE, {metrics['size']:.1f} ids per token: each "
        f"token is in its support, mu sums to 1 over it, checksums of {rows} rows as sampled, KL(mu, pi) by k3 "
        f"{metrics['kl_k3']:.1e} over it and {metrics['kl_k3_without']:.1e} over the vocabulary.",
    )
