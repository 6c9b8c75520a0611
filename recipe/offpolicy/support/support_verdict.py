"""Trainer side of the proof that the support was replayed: judges the workers' reports of each update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..proof.verify import LivenessError
from .support_settings import SupportSettings
from .support_tally import SupportReport

WORSE = 1.1
"""Times that k3 over the support may be what it is over the vocabulary."""
_ROUNDING = 1e-6
"""k3 that is none: of two engines that agree."""


def take_reports(metrics: dict[str, Any], key: str) -> list[SupportReport]:
    """Remove the reports of one update from the metrics of the workers: of every rank and mini-batch."""
    return list(_flatten(metrics.pop(key, [])))


def _flatten(value: Any) -> Iterator[SupportReport]:
    # verl nests lists by rank and mini-batch, and does not where there is one rank.
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


@dataclass(frozen=True)
class SupportVerdict:
    """The verdict on one update.

    Attributes:
        metrics: by their names below ``offpolicy/support/``.
        proof: a sentence.
    """

    metrics: dict[str, float]
    proof: str


def judge(reports: Sequence[SupportReport], settings: SupportSettings, *, first: bool) -> SupportVerdict:
    """Judge the reports of one update, one a mini-batch of every rank.

    Args:
        first: of the run: the support has to bring pi nearer to mu, or leave it where it is.

    Raises:
        LivenessError: nothing was replayed, or it widens the mismatch.
    """
    if not reports:
        raise LivenessError(
            "correction.support=engine: the update came back without a report, so that no support was replayed. "
            "Something runs another worker or engine than the one that replays."
        )
    tokens, known = (sum(getattr(each, name) for each in reports) for name in ("tokens", "known"))
    if tokens and not known:
        raise LivenessError(
            f"correction.support=engine: of {tokens} tokens none has a support of at most {settings.size} members. "
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
            f"{metrics['kl_k3_without']:.2e} over the vocabulary, so that it is not the support that mu was sampled "
            f"from. Fix: see that rollout and trainer run the same model, or set correction.support=null."
        )
    rows = sum(each.compared for each in reports)
    return SupportVerdict(
        metrics,
        f"support of {known / tokens if tokens else 0.0:.1%} of tokens LIVE, {metrics['size']:.1f} ids a token: each "
        f"token is in its own, mu sums to 1 over each, checksums of {rows} rows as sampled, KL(mu, pi) by k3 "
        f"{metrics['kl_k3']:.1e} over it and {metrics['kl_k3_without']:.1e} over the vocabulary.",
    )
