"""Figures of an attribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from ..pages import plotting
from .attribution import Attribution
from .decomposition import Decomposition
from .profiles import Bucket

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def build_panels(attribution: Attribution) -> list[plotting.FigurePanel]:
    """Build the panels of ``draw_overview``."""
    return [
        plotting.FigurePanel(partial(_steps, attribution=attribution), "KL by step and part", _HEIGHT),
        plotting.FigurePanel(
            partial(_shares, attribution=attribution), "Shares of backend, staleness, routing and drift", _HEIGHT
        ),
        *(
            plotting.FigurePanel(
                partial(_profile, name=name, buckets=attribution.profiles[name]),
                f"Shares of tokens and of KL by {name}",
                _HEIGHT,
            )
            for name in _SHOWN
            if len(attribution.profiles[name]) > 1
        ),
    ]


def _steps(axes: Axes, attribution: Attribution) -> None:
    steps = list(attribution.by_step)
    parts = list(attribution.by_step.values())
    axes.set_title("KL of mu and pi by step")
    axes.set_ylabel("nats a token")
    axes.set_xlabel("step")
    names = _names(all(part.kl.backend is not None for part in parts), attribution.whole)
    base = [0.0] * len(steps)
    for name in names:
        heights = [_height(part, name) for part in parts]
        label = attribution.whole.together if name == "rollout" else name
        axes.bar(steps, heights, bottom=base, width=0.7, color=plotting.PALETTE[_COLOURS[name]], label=label)
        base = [below + height for below, height in zip(base, heights, strict=True)]
    _whole_ticks(axes)
    axes.set_ylim(0.0, 1.05 * max(base) or 1.0)
    plotting.add_legend(axes, columns=3)


def _shares(axes: Axes, attribution: Attribution) -> None:
    whole = attribution.whole
    axes.set_title("Shares of all steps")
    if not (math.isfinite(whole.variance.rollout) or math.isfinite(whole.kl.rollout)):
        _say(axes, "mu and pi agree exactly" if whole.kl.whole == 0 else "no variance to share out")
        return
    names = _names(whole.kl.backend is not None, whole)
    labels = []
    for place, name in enumerate(names):
        for offset, (key, split) in enumerate((("variance", whole.variance), ("kl", whole.kl))):
            share = getattr(split, name)
            if not math.isfinite(share):
                continue
            low, high = whole.intervals.get(f"{key}.{name}", (share, share))
            axes.barh(
                place + 0.36 * offset - 0.18,
                share,
                height=0.32,
                color=plotting.PALETTE[_COLOURS[name]],
                alpha=1.0 if key == "variance" else 0.5,
                xerr=[[max(share - low, 0.0)], [max(high - share, 0.0)]],
                ecolor=plotting.INK,
            )
        labels.append(whole.together.replace("and ", "and\n") if name == "rollout" else name)
    axes.set_yticks(range(len(names)), labels)
    axes.invert_yaxis()
    axes.axvline(0.0, color=plotting.MUTED, linewidth=0.8)
    axes.set_xlabel("of variance (dark) and of KL (light), with 90 %")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _names(apart: bool, whole: Decomposition) -> list[str]:
    """List the parts to draw.

    Args:
        apart: True if backend and staleness are both identified.
    """
    parts = ["backend", "staleness"] if apart else ["rollout"]
    if whole.kl.routing is not None:
        parts.append("routing")
    return parts if whole.kl.drift is None else [*parts, "drift"]


def _profile(axes: Axes, name: str, buckets: Sequence[Bucket]) -> None:
    axes.set_title(f"By {name}" + (" under mu" if name == "probability" else ""))
    if not any(bucket.k3 > 0 for bucket in buckets):
        _say(axes, "mu and pi_old agree exactly")
        return
    tokens = sum(bucket.tokens for bucket in buckets)
    for offset, label, shares, colour in (
        (-0.2, "share of tokens", [bucket.tokens / tokens for bucket in buckets], plotting.MUTED),
        (0.2, "share of KL", [bucket.share for bucket in buckets], plotting.PALETTE[0]),
    ):
        axes.bar([place + offset for place in range(len(buckets))], shares, width=0.38, color=colour, label=label)
    axes.set_xticks(range(len(buckets)), [_label(name, bucket.name) for bucket in buckets], fontsize=8)
    axes.set_xlabel(_SHOWN[name])
    axes.set_ylabel("share")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    plotting.add_legend(axes)


def _height(part: Decomposition, name: str) -> float:
    """Compute nats a token; 0 where both policies agree exactly and there is nothing to share."""
    return max((getattr(part.kl, name) or 0.0) * part.kl.whole, 0.0) if part.kl.whole > 0 else 0.0


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", color=plotting.MUTED, fontsize=11, transform=axes.transAxes)
    axes.set_axis_off()


def _label(profile: str, bucket: str) -> str:
    return str(int(bucket) + 1) if profile == "turn" and bucket.isdigit() else bucket


def _whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
