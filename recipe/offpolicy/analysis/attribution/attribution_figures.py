"""Figures of an attribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ..pages import plotting
from ..pages.panels import Axis, Mark, Panel, Rule
from .attribution import Attribution
from .decomposition import Decomposition
from .profiles import Bucket

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS: Final = {"backend": 0, "staleness": 1, "routing": 4, "drift": 2, "rollout": 6}
_SHOWN: Final = {
    "position": "position in the response, tokens",
    "probability": "probability of the token under mu",
    "length": "length of the response, tokens",
    "turn": "turn",
}
"""Profile -> what its buckets are ranges of."""
_HEIGHT: Final = 3.4


def draw_overview(attribution: Attribution) -> Figure:
    """Draw steps and profiles by position, probability, length and turn into one figure."""
    return plotting.draw_panels(build_panels(attribution), columns=2)


def build_panels(attribution: Attribution) -> list[Panel]:
    """Build the panels of ``draw_overview``."""
    profiles = {name: attribution.profiles[name] for name in _SHOWN if len(attribution.profiles[name]) > 1}
    return [
        _build_steps(attribution),
        _build_shares(attribution.whole),
        *(_build_profile(name, buckets) for name, buckets in profiles.items()),
    ]


def _build_steps(attribution: Attribution) -> Panel:
    steps, parts = list(attribution.by_step), list(attribution.by_step.values())
    base, marks = [0.0] * len(steps), []
    for name in _names(all(part.kl.backend is not None for part in parts), attribution.whole):
        heights = [_height(part, name) for part in parts]
        label = attribution.whole.together if name == "rollout" else name
        marks.append(Mark(steps, heights, label, plotting.PALETTE[_COLOURS[name]], bar=0.7, base=base))
        base = [below + height for below, height in zip(base, heights, strict=True)]
    y = Axis("nats a token", limits=(0.0, 1.05 * max(base) or 1.0))
    x = Axis("step", form="whole")
    return Panel("KL of mu and pi by step", "KL by step and part", x, y, marks, height=_HEIGHT, columns=3)


def _build_shares(whole: Decomposition) -> Panel:
    names = _names(whole.kl.backend is not None, whole)
    marks: list[Mark | Rule] = []
    for offset, alpha, key, split in ((-0.18, 1.0, "variance", whole.variance), (0.18, 0.5, "kl", whole.kl)):
        for place, name in enumerate(names):
            if math.isfinite(share := getattr(split, name)):
                low, high = whole.intervals.get(f"{key}.{name}", (share, share))
                band = ([min(low, share)], [max(high, share)])
                colour = plotting.PALETTE[_COLOURS[name]]
                marks.append(Mark([place + offset], [share], colour=colour, band=band, bar=0.32, alpha=alpha))
    said = "mu and pi agree exactly" if whole.kl.whole == 0 else "no variance to share out"
    ticks = {place: whole.together if name == "rollout" else name for place, name in enumerate(names)}
    return Panel(
        "Shares of all steps",
        "Shares of backend, staleness, routing and drift",
        Axis("of variance (dark) and of KL (light), with 90 %", ticks=ticks),
        Axis("share", form="percent"),
        [*marks, Rule(0.0, "y", dash="-")] if marks else [],
        "" if marks else said,
        _HEIGHT,
    )


def _names(apart: bool, whole: Decomposition) -> list[str]:
    """List the parts to draw.

    Args:
        apart: True if backend and staleness are both identified.
    """
    parts = ["backend", "staleness"] if apart else ["rollout"]
    if whole.kl.routing is not None:
        parts.append("routing")
    return parts if whole.kl.drift is None else [*parts, "drift"]


def _build_profile(name: str, buckets: Sequence[Bucket]) -> Panel:
    places, tokens = range(len(buckets)), sum(bucket.tokens for bucket in buckets)
    of_tokens, of_kl = [bucket.tokens / tokens for bucket in buckets], [bucket.share for bucket in buckets]
    marks = [
        Mark([place - 0.2 for place in places], of_tokens, "share of tokens", plotting.MUTED, bar=0.38),
        Mark([place + 0.2 for place in places], of_kl, "share of KL", bar=0.38),
    ]
    agree = not any(bucket.k3 > 0 for bucket in buckets)
    return Panel(
        f"By {name}" + (" under mu" if name == "probability" else ""),
        f"Shares of tokens and of KL by {name}",
        Axis(_SHOWN[name], ticks={place: _label(name, bucket.name) for place, bucket in enumerate(buckets)}),
        Axis("share", form="percent"),
        [] if agree else marks,
        "mu and pi_old agree exactly" if agree else "",
        _HEIGHT,
    )


def _height(part: Decomposition, name: str) -> float:
    """Compute nats a token; 0 where both policies agree exactly and there is nothing to share."""
    return max((getattr(part.kl, name) or 0.0) * part.kl.whole, 0.0) if part.kl.whole > 0 else 0.0


def _label(profile: str, bucket: str) -> str:
    return str(int(bucket) + 1) if profile == "turn" and bucket.isdigit() else bucket
