"""A report as a page: the verdict, then pictures, then details."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...correction import CorrectionSpec, MaskSpec, WeightSpec
from ..attribution import figures as attribution_figures
from ..attribution import tables as attribution_tables
from ..attribution.attribution import Attribution
from ..attribution.page import HOW
from ..attribution.scored import left_out_note
from ..attribution.text import escaped
from ..calibration import drawings as calibration_drawings
from ..calibration import tables as calibration_tables
from ..pages import Column, Page, Table, code, details, keys, panels, paragraph, table
from ..whatif import show
from ..whatif.html import MEANINGS
from . import drawings
from .sample import Sample
from .studies import TARGET_ESS, TARGET_KEPT, Studies
from .timeline import REFERENCES, Timeline
from .verdict import answers, table_of

if TYPE_CHECKING:
    from markupsafe import Markup

    from ..whatif.results import Study

CONFIDENCE = 0.95
_LONGEST_CONFIG = 400_000
"""Characters of the configuration that are shown."""
_LONGEST_TABLE = 60
_CARD = ("model", "release", "path", "started", "fingerprint")


@dataclass(frozen=True)
class Found:
    """Everything that a report shows.

    Attributes:
        source: the recording's directory.
        card, proof: as recorded, less secrets; empty where they were not.
    """

    source: str
    card: Mapping[str, Any]
    proof: Mapping[str, Any]
    sample: Sample
    timeline: Timeline
    studies: Studies


def page_of(found: Found) -> Page:
    """The page."""
    spec = CorrectionSpec.from_mapping(found.timeline.correction)
    page = Page("Off-policy report", escaped(f"{found.source}: {found.timeline.rows:,} responses"))
    page.section(
        "Verdict",
        table(table_of(answers(found.timeline, spec, found.proof, found.studies))),
        paragraph(found.sample.sentence),
    )
    page.section("Run and proof of life", *_run(found, spec))
    page.section("Reward and mismatch over time", *_over_time(found.timeline))
    if names := found.timeline.extensions:
        page.section("Extensions", *_extensions(found.timeline, names))
    page.section("Kept share by length", *_by_length(found.timeline))
    page.section("Where the mismatch comes from", *_attribution(found.studies.attribution))
    page.section("Calibration", *_calibration(found.studies))
    page.section("Worst examples", *_worst(found.studies.attribution))
    page.section("What other corrections would have done", *_what_if(found.studies.study))
    page.section("Configuration", *_configuration(found.card))
    return page


def spec_text(spec: CorrectionSpec) -> dict[str, str]:
    """A correction in words: its keys and what each part does."""
    parts: dict[str, WeightSpec | MaskSpec] = {f"masks.{name}": mask for name, mask in spec.masks}
    if spec.weight is not None:
        parts = {"weight": spec.weight, **parts}
    text = {key: _part_text(part) for key, part in parts.items()} or {"correction": "none"}
    settings = {
        name: value
        for name, value in spec.to_mapping().items()
        if name not in ("weight", "masks") and value != CorrectionSpec().to_mapping()[name]
    }
    return text | {name: json.dumps(value) for name, value in settings.items()}


def _part_text(part: WeightSpec | MaskSpec) -> str:
    named = {name: getattr(part, name, None) for name in ("lower", "upper", "delta", "budget")}
    if named["delta"] is not None:
        named["lower"] = None
    bounds = calibration_tables.bounds({name: value for name, value in named.items() if value is not None})
    kind = part.kind if isinstance(part, WeightSpec) else "mask"
    when = f", advantage {part.when}" if isinstance(part, MaskSpec) and part.when != "any" else ""
    return f"{kind} on {part.ratio}, {part.aggregate} by {part.level}, {bounds or 'no bounds'}{when}"


def _run(found: Found, spec: CorrectionSpec) -> list[Markup]:
    facts = {name: escaped(str(found.card[name])) for name in _CARD if name in found.card}
    sampling = found.card.get("sampling")
    if isinstance(sampling, Mapping):
        facts["sampling"] = escaped(", ".join(f"{name} {value}" for name, value in sampling.items()))
    facts |= {"responses": f"{found.timeline.rows:,}", "response tokens": f"{found.timeline.tokens:,}"}
    blocks = [keys(facts | spec_text(spec))]
    if not found.card:
        blocks.insert(0, paragraph("run.json was not recorded: model, release and configuration are not known."))
    if found.timeline.changed:
        steps = ", ".join(map(str, found.timeline.changed[:10])) + (" ..." if len(found.timeline.changed) > 10 else "")
        blocks.append(paragraph(f"The correction changed during the run, before steps {steps}; shown is the last one."))
    numbers = found.proof.get("live")
    if isinstance(numbers, Mapping):
        blocks.append(details("The proof in numbers", keys({escaped(str(k)): _whole(v) for k, v in numbers.items()})))
    elif not spec.is_none:
        blocks.append(paragraph("proof.json was not recorded: that the correction reached the gradient is not shown."))
    return blocks


def _whole(value: Any) -> Any:
    """Counts and fingerprints are recorded as floats, and read as whole numbers."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else value


def _over_time(timeline: Timeline) -> list[Markup]:
    columns = (
        Column("step"),
        Column("responses"),
        Column("reward"),
        Column("T", digits=1),
        Column("KL(mu, pi_old)", "nats", digits=6),
        Column("|log pi / pi_old|", "nats", digits=6),
        Column("staleness", digits=2),
        Column("tokens kept"),
        Column("rows kept"),
        Column("ESS"),
    )
    shown = timeline.steps[:: max(1, -(-len(timeline.steps) // _LONGEST_TABLE))]
    rows = [
        (s.step, s.rows, s.reward, s.length, s.kl, s.drift, s.staleness, s.kept_tokens, s.kept_rows, s.ess)
        for s in shown
    ]
    name = "Every step in numbers" if len(shown) == len(timeline.steps) else f"{len(shown)} of these steps in numbers"
    return [panels(drawings.over_time(timeline)), details(name, table(Table(columns, rows)))]


def _extensions(timeline: Timeline, names: Sequence[str]) -> list[Markup]:
    shown = timeline.steps[:: max(1, -(-len(timeline.steps) // _LONGEST_TABLE))]
    rows = [(step.step, *(step.extensions.get(name, math.nan) for name in names)) for step in shown]
    columns = (Column("step"), *(Column(name.removeprefix("offpolicy_"), digits=4) for name in names))
    return [paragraph("Means over response tokens of the columns that extensions sent."), table(Table(columns, rows))]


def _by_length(timeline: Timeline) -> list[Markup]:
    if not timeline.lengths:
        return [paragraph("No response has a token with a finite mu and pi_old.")]
    columns = (
        Column("T", align="left"),
        Column("rows"),
        Column("rows kept"),
        Column("tokens kept"),
        *(Column(f"rows, {meaning}") for meaning in REFERENCES.values()),
    )
    rows = [
        (
            calibration_tables.bucket_text(entry.bucket),
            entry.rows,
            entry.kept_rows,
            entry.kept_tokens,
            *(entry.references[key] for key in REFERENCES),
        )
        for entry in timeline.lengths
    ]
    drawn = len(timeline.lengths) > 1
    blocks = [
        paragraph(
            "Noise averages out in a geometric mean and adds up in a product: a mask on the first rejects short rows, "
            f"on the second long ones.{' Dashed: what each would keep here, whatever was on.' if drawn else ''}"
        ),
        *([panels(drawings.by_length(timeline))] if drawn else []),
        table(Table(columns, rows)),
    ]
    if timeline.reasons:
        reasons = Table(
            (Column("rejected by"), Column("share of tokens", digits=4)),
            [list(item) for item in timeline.reasons.items()],
        )
        blocks.append(table(reasons))
    return blocks


def _attribution(attribution: Attribution | str) -> list[Markup]:
    if isinstance(attribution, str):
        return [paragraph(f"Not attributed: {attribution}")]
    if not attribution.whole.kl.whole > 0:
        note = left_out_note(attribution.left_out)
        return [
            paragraph(f"mu and pi agree exactly on every token: there is no mismatch to attribute. {note}".rstrip())
        ]
    profiles = (
        table(attribution_tables.profile_table(name, buckets)) for name, buckets in attribution.profiles.items()
    )
    return [
        paragraph(attribution_tables.verdict(attribution)),
        panels(attribution_figures.panels(attribution)),
        table(attribution_tables.shares_table(attribution.whole)),
        details("How it is split", paragraph(HOW)),
        details("Every cause that was looked for", table(attribution_tables.causes_table(attribution))),
        details("By age of the weights", table(attribution_tables.versions_table(attribution))),
        details("Profiles in numbers", *profiles),
    ]


def _calibration(studies: Studies) -> list[Markup]:
    result = studies.calibrated
    if isinstance(result, str):
        return [paragraph(f"Not calibrated: {result}")]
    new = f" Not on during the run: {', '.join(sorted(studies.new))}." if studies.new else ""
    blocks = [
        paragraph(
            f"Bounds for a kept share of {TARGET_KEPT:g} (masks) and an ESS of {TARGET_ESS:g} (weight), "
            f"with {CONFIDENCE:.0%} intervals that take rows of one prompt for dependent.{new}"
        ),
        panels(calibration_drawings.panels(result.proposals, CONFIDENCE)),
        table(calibration_tables.overview(result, CONFIDENCE)),
    ]
    if not isinstance(studies.attribution, str) and studies.attribution.mend_first:
        blocks.insert(0, paragraph(studies.attribution.mend_first))
    if pasted := calibration_tables.overrides(result):
        blocks.append(code(" \\\n".join(map(shlex.quote, pasted))))
    blocks += [paragraph(remark) for remark in calibration_tables.remarks(result, CONFIDENCE)]
    blocks += [
        details(f"{proposal.part.key} by length", table(calibration_tables.by_length(proposal, CONFIDENCE)))
        for proposal in result.proposals
        if proposal.lengths
    ]
    return blocks


def _worst(attribution: Attribution | str) -> list[Markup]:
    if isinstance(attribution, str):
        return [paragraph(f"Not attributed: {attribution}")]
    note = f" Ids in place of text: {attribution.without_text}." if attribution.without_text else ""
    if not attribution.tokens:
        return [paragraph("No token differs between mu and pi.")]
    return [
        paragraph(f"The largest mismatches by k3 of log pi/mu.{note}"),
        table(attribution_tables.tokens_table(attribution)),
        table(attribution_tables.rows_table(attribution)),
    ]


def _what_if(study: Study | str) -> list[Markup]:
    if isinstance(study, str):
        return [paragraph(f"Not replayed: {study}")]
    blocks = [paragraph(show.fidelity_sentence(study.fidelity)), *(paragraph(note) for note in study.notes)]
    if study.outcomes:
        blocks += [table(show.overall_table(study)), table(show.group_table(study))]
    if study.failures:
        blocks.append(table(show.failure_table(study)))
    return [*blocks, details("What the columns mean", keys(MEANINGS))]


def _configuration(card: Mapping[str, Any]) -> list[Markup]:
    if not card:
        return [paragraph("run.json was not recorded.")]
    text = json.dumps(card, indent=1, sort_keys=True, default=str)
    cut = f" (its first {_LONGEST_CONFIG:,} characters)" if len(text) > _LONGEST_CONFIG else ""
    return [details(f"run.json{cut}", code(text[:_LONGEST_CONFIG]))]
