"""Figures and HTML page of an attribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ..pages import Details, Page, plotting
from ..pages.panels import Axis, Mark, Panel, Rule
from . import attribution_tables
from .attribution import Attribution
from .decomposition import Decomposition
from .frames import Bucket
from .worst_examples import escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_COLOURS: Final = {"backend": 0, "staleness": 1, "routing": 4, "drift": 2, "rollout": 6}
_SHOWN: Final = {
    "position": "position in the response, tokens",
    "probability": "probability of the token under mu",
    "length": "length of the response, tokens",
    "turn": "turn",
}
"""Profile -> the quantity whose ranges form its buckets."""
_HEIGHT: Final = 3.4


def draw_overview(attribution: Attribution) -> Figure:
    """Draw the steps, and the profiles by position, probability, length and turn, into one figure."""
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
    y = Axis("nats per token", limits=(0.0, 1.05 * max(base) or 1.0))
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
    said = "mu and pi agree exactly" if whole.kl.whole == 0 else "no variance to divide"
    ticks = {place: whole.together if name == "rollout" else name for place, name in enumerate(names)}
    return Panel(
        "Shares of all steps",
        "Shares of backend, staleness, routing and drift",
        Axis("share of variance (dark) and of KL (light), 90 % intervals", ticks=ticks),
        Axis("share", form="percent"),
        [*marks, Rule(0.0, "y", dash="-")] if marks else [],
        "" if marks else said,
        _HEIGHT,
    )


def _names(apart: bool, whole: Decomposition) -> list[str]:
    """List the parts to draw.

    Args:
        apart: whether backend and staleness are both identified.
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
    """Compute nats per token; 0 if both policies agree exactly and there is nothing to split."""
    return max((getattr(part.kl, name) or 0.0) * part.kl.whole, 0.0) if part.kl.whole > 0 else 0.0


def _label(profile: str, bucket: str) -> str:
    return str(int(bucket) + 1) if profile == "turn" and bucket.isdigit() else bucket


METHOD = (
    "log pi/mu of each token is backend + staleness + drift. If expert routes are replayed and log pi_old was "
    "recorded without replay as well, routing is what the trainer's own routes add to it, and the whole is log pi/mu "
    "as it would be without replay: backend + staleness + routing + drift. Shares of variance are covariances with the "
    "whole, so they sum to 1; a negative share offsets the others. Shares of KL are the increments of k3 as each part "
    "is added, in this order. The backend's part of stale rows is estimated from fresh rows at the same "
    "probability, because the trainer runs no forward pass with the weights that sampled them; without fresh rows it "
    "is not identified. Staleness is determined by the versions that verl records; if the causes show older weights "
    "than these versions do, backend and staleness are not separated. If the run used mu or a mixture as pi_old "
    "(correction.proximal=bypass, same_engine or loglinear), pi at a step's first gradient step replaces it, because "
    "no update has changed pi yet. Rows of later gradient steps are then left out, shares refer to KL(mu, pi_old), "
    "and drift is not identified."
)


def add_sections(page: Page, attribution: Attribution) -> None:
    """Add causes, shares, figures and the worst examples to a page."""
    fixes = (f"Fix for {fix}" for fix in attribution_tables.list_fixes(attribution))
    causes = attribution_tables.build_causes_table(attribution)
    page.add_section("Causes", attribution_tables.format_verdict(attribution), *fixes, causes)
    page.add_section(
        "Where the mismatch comes from",
        METHOD,
        attribution_tables.build_shares_table(attribution.whole),
        attribution_tables.format_replayed(attribution.whole),
        build_panels(attribution),
        attribution_tables.build_versions_table(attribution),
        Details("Every step", [attribution_tables.build_steps_table(dict(attribution.by_step))]),
        Details("Profiles in numbers", attribution_tables.build_profile_tables(attribution)),
    )
    note = f"Ids are shown instead of text: {attribution.without_text}." if attribution.without_text else ""
    examples = (attribution_tables.build_tokens_table(attribution), attribution_tables.build_rows_table(attribution))
    page.add_section("Worst examples", f"Sorted by k3 of log pi/mu. {note}", *examples)


def build_page(attribution: Attribution, source: str) -> Page:
    """Build a page that holds the attribution alone."""
    page = Page("Where does the mismatch come from?", escape(source))
    facts = {
        "steps": f"{attribution.steps[0]} to {attribution.steps[-1]}",
        "rows": attribution.rows,
        "tokens": attribution.whole.tokens,
        "KL(mu, pi), nats per token": attribution.whole.kl.whole,
        "variance of log pi/mu": attribution.whole.variance.whole,
    }
    page.add_section("Recording", facts)
    add_sections(page, attribution)
    return page
