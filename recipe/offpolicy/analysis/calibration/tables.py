"""Proposals as tables, sentences, overrides and plain values."""

from __future__ import annotations

import math
from typing import Any

from ...correction.catalogue import BUCKETS
from ..pages import Column, Table
from ..whatif.composed import composer
from ..whatif.pasted import overrides_of
from .joint import Joint
from .parts import Part
from .propose import Calibrated, OfLength, Proposal
from .thresholds import Threshold

BY_LENGTH = "advice, for the correction takes one bound; these tell which lengths it would hit"


def overview(result: Calibrated, confidence: float) -> Table:
    """A row a bound: what it is, what it should be, and what each keeps of what it looks at, and of all."""
    partial = any(proposal.looked < 1 for proposal in result.proposals)
    columns = (
        Column("bound"),
        Column("of"),
        Column("target", digits=4),
        Column("now"),
        Column("reaches", digits=4),
        *([Column("of all", digits=4)] if partial else []),
        Column("proposed"),
        Column(f"{confidence:.0%} interval"),
        Column("reaches then", digits=4),
        *([Column("of all then", digits=4)] if partial else []),
        Column("units"),
        Column("prompts"),
    )
    rows = [
        (
            part_name(proposal.part),
            _counted(proposal),
            proposal.goal,
            bounds(proposal.part.now),
            proposal.now,
            *([proposal.of_all(proposal.now)] if partial else []),
            bounds(proposal.threshold.values) if proposal.found else "none",
            interval(proposal.part, proposal.threshold),
            proposal.threshold.reached,
            *([proposal.of_all(proposal.threshold.reached)] if partial else []),
            proposal.threshold.count,
            proposal.threshold.groups,
        )
        for proposal in result.proposals
    ]
    return Table(columns, rows, "Proposed bounds")


def _counted(proposal: Proposal) -> str:
    """What a target is a share of: of a mask for one sign of the advantage, what has that sign."""
    return "ESS" if proposal.target == "ess" else f"kept of {proposal.part.looks_at}"


def by_length(proposal: Proposal, confidence: float) -> Table:
    """A row a bucket of T, as advice."""
    part = proposal.part
    remarked = any(entry.threshold.note for entry in proposal.lengths)
    common = proposal.threshold.values or ({} if part.unset else part.now)
    columns = (
        Column("T"),
        Column("rows"),
        Column(f"{bounds(common) or 'the common bound'} reaches", digits=4),
        Column(f"reaches {proposal.goal:g} alone"),
        Column(f"{confidence:.0%} interval"),
        *([Column("remark")] if remarked else []),
    )
    rows = [
        (
            bucket_text(entry.bucket),
            entry.rows,
            entry.reached,
            bounds(entry.threshold.values) or "none",
            interval(proposal.part, entry.threshold),
            *([entry.threshold.note] if remarked else []),
        )
        for entry in proposal.lengths
    ]
    return Table(columns, rows, f"{part_name(part)} by length: {BY_LENGTH}")


def together(now: Joint | None, then: Joint) -> Table:
    """The whole correction, before and after."""
    columns = (Column(""), Column("now", digits=4), Column("then", digits=4))
    named = {"response tokens kept": "tokens", "rows with a token kept": "rows", "ESS of weight x keep": "ess"}
    rows = [(text, None if now is None else getattr(now, key), getattr(then, key)) for text, key in named.items()]
    return Table(columns, rows, "All of it together")


def remarks(result: Calibrated, confidence: float) -> list[str]:
    """What has to be said beside the tables, a sentence each."""
    said = []
    for proposal in result.proposals:
        name, threshold = part_name(proposal.part), proposal.threshold
        if threshold.note:
            said.append(
                threshold.note if threshold.note.startswith(proposal.part.key) else f"{name}: {threshold.note}."
            )
        said += [_floor(proposal, confidence)] if proposal.floor is not None else []
        said.append(length_sentence(proposal, confidence))
    said += [f"{key}: not calibrated, {why}." for key, why in result.skipped.items()]
    if result.nonfinite:
        said.append(
            f"{result.nonfinite:,} response tokens have a log_prob that is not finite: bounds on pi leave "
            f"them out, and training stops at one."
        )
    if result.grouped < 1:
        said.append(
            f"The prompt of {1 - result.grouped:.0%} of the rows was not recorded: they count as independent, and the "
            f"intervals are too narrow if they are not."
        )
    return said


def length_sentence(proposal: Proposal, confidence: float) -> str:
    """Whether the statistic depends on the length of a row, and by what criterion."""
    name, test = part_name(proposal.part), proposal.length
    if math.isnan(test.correlation):
        return f"{name}: whether it depends on length is not identified by {test.rows} comparable rows."
    criterion = (
        f"rank correlation of its {test.measure} with T {test.correlation:+.2f}, {confidence:.0%} interval "
        f"[{test.interval[0]:+.2f}, {test.interval[1]:+.2f}]"
    )
    if not test.depends:
        return f"{name}: no dependence on length shown ({criterion}), so one bound for all lengths."
    direction = "short" if test.correlation < 0 else "long"
    advice = " The correction takes one bound: see the bounds by length before setting it." if proposal.lengths else ""
    return (
        f"{name}: depends on length ({criterion}; it goes as T^{test.exponent:.2f}), so one bound rejects {direction} "
        f"rows first.{advice}"
    )


def overrides(result: Calibrated) -> list[str]:
    """What to put behind the overrides of a launch: the correction with the bounds that were found.

    Empty where none was.
    """
    if not any(proposal.found for proposal in result.proposals):
        return []
    with composer():
        return overrides_of(result.spec)


def part_name(part: Part) -> str:
    """The key, with the side where only one of two bounds moves."""
    two = part.spec.lower is not None and part.spec.upper is not None
    return f"{part.key}.{part.side}" if two and part.side != "both" else part.key


def bounds(values: Any) -> str:
    """``[0.99, 1.01]``, ``upper 2.0``, ``delta 0.1``; empty for none."""
    if {"lower", "upper"} <= set(values):
        return f"[{_number(values['lower'])}, {_number(values['upper'])}]"
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def interval(part: Part, threshold: Threshold) -> str:
    """The interval in the configuration's own values; "-" where there is none."""
    low, high = threshold.interval
    if not threshold.values or math.isnan(low):
        return "-"
    name = list(part.now)[-1]
    ends = [_end(part, name, radius) for radius in (low, high)]
    text = " to ".join("open" if math.isinf(end) else f"{end:.5g}" for end in ends)
    return f"{name} {text}"


def bucket_text(bucket: str) -> str:
    """``le64`` as ``17 to 64``."""
    names, most = list(BUCKETS), BUCKETS[bucket]
    before = BUCKETS[names[names.index(bucket) - 1]] if names.index(bucket) else 0
    return f"over {before}" if most is None else f"{(before or 0) + 1} to {most}"


def plain(result: Calibrated, now: Joint | None, then: Joint, confidence: float) -> dict[str, Any]:
    """Everything, for JSON; what has no value is None."""
    return {
        "confidence": confidence,
        "overrides": overrides(result),
        "proposals": [_plain(proposal) for proposal in result.proposals],
        "together": {"now": None if now is None else _finite(vars(now)), "then": _finite(vars(then))},
        "skipped": dict(result.skipped),
        "remarks": remarks(result, confidence),
    }


def _plain(proposal: Proposal) -> dict[str, Any]:
    part, test = proposal.part, proposal.length
    return {
        "key": f"correction.{part.key}",
        "side": part.side,
        "target": proposal.target,
        "of": "tokens" if proposal.target == "ess" else part.share_of,
        "goal": proposal.goal,
        "now": part.now,
        "looked": proposal.looked,
        "reached_now": _number_or_none(proposal.now),
        "reached_now_of_all": _number_or_none(proposal.of_all(proposal.now)),
        "reached_of_all": _number_or_none(proposal.of_all(proposal.threshold.reached)),
        "proposed": _threshold(part, proposal.threshold),
        "floor": None if proposal.floor is None else _finite(vars(proposal.floor)),
        "length": {**_finite(vars(test)), "interval": [_number_or_none(end) for end in test.interval]}
        | {"depends": test.depends},
        "by_length": {entry.bucket: _of_length(part, entry) for entry in proposal.lengths},
    }


def _of_length(part: Part, entry: OfLength) -> dict[str, Any]:
    return {"rows": entry.rows, "reached": _number_or_none(entry.reached), "alone": _threshold(part, entry.threshold)}


def _threshold(part: Part, threshold: Threshold) -> dict[str, Any]:
    name = list(part.now)[-1]
    return {
        "values": threshold.values,
        "interval": {name: [_number_or_none(_end(part, name, radius)) for radius in threshold.interval]},
        "reached": _number_or_none(threshold.reached),
        "units": threshold.count,
        "prompts": threshold.groups,
        "note": threshold.note,
    }


def _end(part: Part, name: str, radius: float) -> float:
    """An end of an interval as the value ``name`` would have there; infinite where it is open."""
    return radius if not math.isfinite(radius) else part.values_at(radius)[name]


def _floor(proposal: Proposal, confidence: float) -> str:
    floor = proposal.floor
    assert floor is not None
    assumed = (
        f" The versions of the weights of {floor.unknown_versions} of them are not known; they count as fresh."
        if floor.unknown_versions
        else ""
    )
    return (
        f"{part_name(proposal.part)}: backend noise alone, {floor.rows} rows of {floor.groups} prompts at pi = pi_old, "
        f"reaches {floor.quantile:.4g} nats at its {floor.share:g}-quantile, at most {floor.delta:.4g} with "
        f"{confidence:.0%} confidence: delta lies at or above that.{assumed}"
    )


def _number(value: float | None) -> str:
    return "not set" if value is None else repr(value)


def _number_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _number_or_none(value) if isinstance(value, float) else value
        for name, value in values.items()
        if not isinstance(value, tuple)
    }
