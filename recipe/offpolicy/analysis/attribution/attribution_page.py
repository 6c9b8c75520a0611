"""Tables, sentences and panels of an attribution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from ..page import Code, Details, Sections
from ..plotting import MUTED, PALETTE, Axis, Mark, Panel, Rule
from ..table import Column, Table
from .attribution import Attribution
from .cause import THRESHOLDS
from .decomposition import Bucket, Decomposition
from .recorded_tokens import describe_left_out


def compute_kl(attribution: Attribution) -> float:
    """Compute KL(mu, pi_old) by k3, in nats per token, over all tokens; NaN if there are none."""
    tokens = sum(version.tokens for version in attribution.versions)
    return sum(version.k3 * version.tokens for version in attribution.versions) / tokens if tokens else math.nan


def is_healthy(attribution: Attribution) -> bool:
    """Return True if KL(mu, pi_old) is in the normal range for two healthy engines."""
    return compute_kl(attribution) <= THRESHOLDS.healthy


def describe_unexplained(attribution: Attribution) -> str:
    """Describe, in one or two sentences, an attribution that found no cause."""
    kl = compute_kl(attribution)
    if not is_healthy(attribution):
        ages = [version.staleness for version in attribution.versions]
        large = f"The mismatch is large and its cause unknown: KL(mu, pi_old) is {kl:.2g} nats per token"
        large = f"{large}; between two healthy engines it is at most {THRESHOLDS.healthy:g}."
        # Fresh rows let the decomposition separate the effect of age; rows with unknown versions do not show age.
        if 0 in ages or max(ages, default=-1) < 1:
            return large
        return f"{large} No row is fresh (weights up to {max(ages)} steps old), so age alone may explain the mismatch."
    if all(cause.verdict == "not testable" for cause in attribution.causes):
        why = list(dict.fromkeys(cause.sentence for cause in attribution.causes))
        return f"No cause can be tested: {'; '.join(why)}."
    return f"No cause stands out: KL(mu, pi_old) is {kl:.2g} nats per token, which is normal for two healthy engines."


_MEAN, _STD, _KL = Column("mean", "log pi_old/mu", digits=4), Column("std", digits=4), Column("KL", "nats", digits=6)
_OF_KL, _INTERVAL = Column("of KL", align="right"), Column("90 %", align="right")
OPEN, CLOSE = "«", "»"
"""Marks that are put around a token."""
PARTS: Final = {
    "backend": ("backend", "other engine, equal weights"),
    "staleness": ("staleness", "older weights sampled"),
    "routing": ("routing", "own expert routes, not the replayed ones"),
    "drift": ("drift", "pi / pi_old, this step's updates"),
}
"""Name of a share -> label and meaning."""


def _name_parts(found: Decomposition, *, apart: bool) -> dict[str, tuple[str, str]]:
    """Map the name of each share to its label and meaning.

    Args:
        apart: whether backend and staleness are both identified; otherwise they are merged.
    """
    parts = {"rollout": (found.together, "other engine, older weights"), **PARTS}
    names = (*(("backend", "staleness") if apart else ("rollout",)), "routing", "drift")
    return {name: parts[name] for name in names if name != "routing" or found.kl.routing is not None}


def build_shares_table(whole: Decomposition) -> Table:
    """Build the table of the shares of variance and of KL, with intervals."""
    rows: list[list[object]] = []
    for name, part in _name_parts(whole, apart=whole.kl.backend is not None).items():
        row: list[object] = list(part)
        for key, split in (("variance", whole.variance), ("kl", whole.kl)):
            share, ends = getattr(split, name), whole.intervals.get(f"{key}.{name}")
            interval = "" if ends is None else f"{_percent(ends[0])} to {_percent(ends[1])}"
            row += ["not identified", ""] if share is None else [_percent(share), interval]
        rows.append(row)
    columns = [Column("part"), Column("what"), Column("of variance", align="right"), _INTERVAL, _OF_KL, _INTERVAL]
    title = "log pi_old/mu" if whole.kl.drift is None else "log pi/mu"
    return Table(columns, rows, title=f"{title}{_without_replay(whole)}, split")


def _without_replay(found: Decomposition) -> str:
    return "" if found.kl.routing is None else " without replay"


def format_shares(whole: Decomposition) -> str:
    """Format the identified shares of KL in one line."""
    if math.isnan(whole.kl.rollout):
        return "no mismatch to split"
    parts = _name_parts(whole, apart=whole.kl.backend is not None)
    shares = {label: getattr(whole.kl, name) for name, (label, _) in parts.items()}
    known = ", ".join(f"{label} {share:.0%}" for label, share in shares.items() if share is not None)
    of = "KL(mu, pi)" if whole.kl.drift is not None else "KL(mu, pi_old)"
    return f"{known} of {of}{_without_replay(whole)}"


def _format_replayed(whole: Decomposition) -> str:
    """Format the KL with and without replay; empty if log-probs without replay are not recorded."""
    if whole.replayed_kl is None:
        return ""
    without, replayed = f"{whole.kl.whole:.2e}", f"{whole.replayed_kl:.2e}"
    return f"KL(mu, pi) is {without} nats per token without replay of routes, and {replayed} with it."


def _build_steps_table(by_step: Mapping[int, Decomposition]) -> Table:
    splits = list(by_step.values())
    apart = [split for split in splits if split.kl.backend is not None]
    parts = _name_parts((apart or splits)[0], apart=bool(apart))
    columns = [Column("step"), Column("tokens"), Column("KL", "nats", digits=6)]
    columns += [Column(label, "of KL", digits=2, align="right") for label, _ in parts.values()]
    rows = [
        [step, part.tokens, part.kl.whole, *(getattr(part.kl, name) for name in parts), part.floor_from or "-"]
        for step, part in by_step.items()
    ]
    return Table([*columns, Column("backend from")], rows, title="by step")


def _build_versions_table(attribution: Attribution) -> Table:
    columns = [Column("staleness", "steps"), Column("rows"), Column("tokens"), _MEAN, _STD, _KL]
    rows = [
        ["not known" if v.staleness < 0 else v.staleness, v.rows, v.tokens, v.mean, v.std, v.k3, v.backend]
        for v in attribution.versions
    ]
    return Table([*columns, Column("backend's part", digits=6)], rows, title="by version of the weights")


def _build_profile_tables(attribution: Attribution) -> list[Table]:
    numbers = [Column("tokens"), _MEAN, _STD, _KL, _OF_KL, Column("drift", "std", digits=4)]
    return [
        Table(
            [Column(name, align="left"), *numbers],
            [[b.name, b.tokens, b.mean, b.std, b.k3, _percent(b.share), b.drift_std] for b in buckets],
            title=f"by {name}",
        )
        for name, buckets in attribution.profiles.items()
    ]


def _build_tokens_table(attribution: Attribution) -> Table:
    """Build the table of the worst tokens, marking each in its context, with the number of rows that contain it."""
    columns = [Column(name) for name in ("step", "place", "rows")]
    columns += [Column(name, digits=2) for name in ("log mu", "pi_old", "pi")]
    rows = [
        [
            *(t.step, t.position, t.count, t.mu, t.old, t.pi),
            *(_percent(t.share), f"{t.before} {OPEN}{t.token}{CLOSE} {t.after}"),
        ]
        for t in attribution.tokens
    ]
    return Table([*columns, _OF_KL, Column("in its context", align="left")], rows, title="worst tokens")


def _build_rows_table(attribution: Attribution) -> Table:
    """Build the table of the worst rows, listing each text once, with the number of rows that have this text."""
    columns = [Column(name) for name in ("step", "rows", "tokens", "age")]
    columns += [Column("KL", "nats", digits=4), Column("log pi/mu", digits=2), _OF_KL, Column("text", align="left")]
    rows = [
        [
            *(r.step, r.count, r.length, None if r.staleness < 0 else r.staleness),
            *(r.k3, r.log_ratio, _percent(r.share), r.text),
        ]
        for r in attribution.worst
    ]
    return Table(columns, rows, title="worst rows")


def format_verdict(attribution: Attribution) -> str:
    """Format the causes, or a sentence if there are none, and the number of rows that were excluded."""
    present = [cause for cause in attribution.causes if cause.verdict == "present"]
    sentences = [f"{cause.name}: {cause.sentence}." for cause in present] or [describe_unexplained(attribution)]
    if note := describe_left_out(attribution.left_out):
        sentences.append(note)
    if attribution.searched:
        sentences.append(
            f"Causes were searched for in a sample of {attribution.searched:,} tokens; everything else uses all tokens."
        )
    return " ".join(sentences)


def _percent(share: float) -> str:
    return f"{round(share, 3) + 0.0:.1%}" if share == share else "-"  # + 0.0: no "-0.0%"


_COLOURS: Final = {"backend": 0, "staleness": 1, "routing": 4, "drift": 2, "rollout": 6}
_SHOWN: Final = {
    "position": "position in the response, tokens",
    "probability": "probability of the token under mu",
    "length": "length of the response, tokens",
    "turn": "turn",
}
"""Profile -> the quantity that its buckets divide into ranges."""
_HEIGHT: Final = 3.4


def build_panels(attribution: Attribution) -> list[Panel]:
    """Build the panels by step, panels of the shares, and profiles by position, probability, length and turn."""
    profiles = {name: attribution.profiles[name] for name in _SHOWN if len(attribution.profiles[name]) > 1}
    return [
        _build_steps(attribution),
        _build_shares(attribution.whole),
        *(_build_profile(name, buckets) for name, buckets in profiles.items()),
    ]


def _build_steps(attribution: Attribution) -> Panel:
    steps, splits = list(attribution.by_step), [part.kl for part in attribution.by_step.values()]
    base, marks = [0.0] * len(steps), []
    for name, label in _label_parts(attribution.whole, apart=all(kl.backend is not None for kl in splits)).items():
        # In nats per token; 0 if both policies agree exactly, so that there is nothing to split.
        heights = [max((getattr(kl, name) or 0.0) * kl.whole, 0.0) if kl.whole > 0 else 0.0 for kl in splits]
        marks.append(Mark(steps, heights, label, PALETTE[_COLOURS[name]], bar=0.7, base=base))
        base = [below + height for below, height in zip(base, heights, strict=True)]
    y = Axis("nats per token", limits=(0.0, 1.05 * max(base) or 1.0))
    x = Axis("step", form="whole")
    return Panel("KL of mu and pi by step", "KL by step and part", x, y, marks, height=_HEIGHT, columns=3)


def _build_shares(whole: Decomposition) -> Panel:
    labels = _label_parts(whole, apart=whole.kl.backend is not None)
    marks: list[Mark | Rule] = []
    for offset, alpha, key, split in ((-0.18, 1.0, "variance", whole.variance), (0.18, 0.5, "kl", whole.kl)):
        for place, name in enumerate(labels):
            if math.isfinite(share := getattr(split, name)):
                low, high = whole.intervals.get(f"{key}.{name}", (share, share))
                band = ([min(low, share)], [max(high, share)])
                colour = PALETTE[_COLOURS[name]]
                marks.append(Mark([place + offset], [share], colour=colour, band=band, bar=0.32, alpha=alpha))
    said = "mu and pi agree exactly" if whole.kl.whole == 0 else "no variance to divide"
    x = Axis("share of variance (dark) and of KL (light), 90 % intervals", ticks=dict(enumerate(labels.values())))
    y, marks = Axis("share", form="percent"), [*marks, Rule(0.0, "y", dash="-")] if marks else []
    alt = "Shares of backend, staleness, routing and drift"
    return Panel("Shares of all steps", alt, x, y, marks, "" if marks else said, _HEIGHT)


def _label_parts(whole: Decomposition, *, apart: bool) -> dict[str, str]:
    """Map the name of each share to draw to its label."""
    parts = _name_parts(whole, apart=apart)
    return {name: label for name, (label, _) in parts.items() if name != "drift" or whole.kl.drift is not None}


def _build_profile(name: str, buckets: Sequence[Bucket]) -> Panel:
    places, tokens = range(len(buckets)), sum(bucket.tokens for bucket in buckets)
    of_tokens, of_kl = [bucket.tokens / tokens for bucket in buckets], [bucket.share for bucket in buckets]
    marks = [
        Mark([place - 0.2 for place in places], of_tokens, "share of tokens", MUTED, bar=0.38),
        Mark([place + 0.2 for place in places], of_kl, "share of KL", bar=0.38),
    ]
    agree = not any(bucket.k3 > 0 for bucket in buckets)
    names = [str(int(bucket.name) + 1) if name == "turn" else bucket.name for bucket in buckets]
    title, alt = f"By {name}{' under mu' * (name == 'probability')}", f"Shares of tokens and of KL by {name}"
    x, y = Axis(_SHOWN[name], ticks=dict(enumerate(names))), Axis("share", form="percent")
    return Panel(title, alt, x, y, [] if agree else marks, "mu and pi_old agree exactly" if agree else "", _HEIGHT)


METHOD = (
    "log pi/mu of each token is backend + staleness + drift. If expert routes are replayed and log pi_old was "
    "recorded without replay as well, routing is what the trainer's own routes add to it, and the whole is log pi/mu "
    "as it would be without replay: backend + staleness + routing + drift. Shares of variance are covariances with the "
    "whole, so they sum to 1. Shares of KL are the increments of k3 as each part is added, in this order. The "
    "backend's part of stale rows is estimated from fresh rows at the same probability; it is not identified without "
    "fresh rows, or if the causes show older weights than the versions that verl records. If the run used mu or a "
    "mixture as pi_old, pi at a step's first gradient step replaces it; rows of later gradient steps are then left "
    "out, and drift is not identified."
)


def build_sections(attribution: Attribution) -> Sections:
    """Build the sections: causes, shares, figures and the worst examples."""
    causes = [[cause.name, cause.verdict, cause.sentence] for cause in attribution.causes]
    # A table could break an override between lines.
    fixes = [Code(f"Fix for {cause.name}: {cause.fix}") for cause in attribution.causes if cause.fix]
    note = f" Ids are shown instead of text: {attribution.without_text}." if attribution.without_text else ""
    return {
        "Causes": [
            format_verdict(attribution),
            *fixes,
            Table([Column("cause"), Column("verdict"), Column("evidence")], causes, title="causes"),
        ],
        "Where the mismatch comes from": [
            build_shares_table(attribution.whole),
            _format_replayed(attribution.whole),
            build_panels(attribution),
            Details("How the mismatch is divided", [METHOD]),
            _build_versions_table(attribution),
            Details("Every step", [_build_steps_table(attribution.by_step)]),
            Details("Profiles in numbers", _build_profile_tables(attribution)),
        ],
        "Worst examples": [
            f"The largest mismatches by k3 of log pi/mu.{note}",
            _build_tokens_table(attribution),
            _build_rows_table(attribution),
        ],
    }
