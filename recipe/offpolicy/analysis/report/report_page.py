"""HTML page of a report, written once or after each recorded step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...correction import CorrectionSpec, MaskSpec, WeightSpec
from ...fault_tolerance.redaction import redact
from ...preflight.examination import describe_part
from ...recording import Recording, RecordingError
from ...recording.recording import read_extensions
from .. import page as render
from ..attribution.attribution_page import build_sections
from ..attribution.worst_examples import escape
from ..calibration import calibration_page
from ..calibration.calibration_page import format_bucket
from ..page import Block, Code, Details, Sections
from ..plotting import MUTED, Axis, Mark, Panel, Series, limit_shares, merge_equal_series, style_line
from ..table import Column, Table
from ..whatif import whatif_page
from .timeline import Part, StepNumbers, Timeline, merge_parts, summarize_steps
from .verdict import TARGET_ESS, TARGET_KEPT, Studies, build_answers, build_table

_DECADES = 30
_LONGEST_TABLE = 60
_CARD = ("model", "release", "path", "started", "fingerprint")
_MARKED = 40
"""Largest number of steps for which each step is drawn with a marker."""
_KEPT = {"tokens kept": "kept_tokens", "rows kept": "kept_rows", "ESS of weight x keep": "ess"}
_MISMATCH = {"mismatch, KL(mu, pi_old)": "kl", "drift, mean |log pi / pi_old|": "drift"}
_LENGTH = {"all answers": "length", "right answers": "length_right", "wrong answers": "length_wrong"}


def build_step_panels(timeline: Timeline) -> list[Panel]:
    """Build the panels by step: reward, mismatch, kept shares, length and, if any rows are stale, staleness."""
    graded = all(np.isfinite(timeline.get_column(name)).any() for name in ("length_right", "length_wrong"))
    lengths = _LENGTH if graded else {"": "length"}
    kept = _plot(timeline, "What the recorded correction kept", "Shares kept and effective sample size", "share", _KEPT)
    panels = [
        _plot(timeline, "Reward", "Mean reward", "mean reward of a response", {"": "reward"}),
        _limit_nats(_plot(timeline, "Mismatch", "KL(mu, pi_old) and drift", "nats per token", _MISMATCH)),
        replace(kept, y=limit_shares(kept.y, kept.marks)),
        _plot(timeline, "Response length", "Response length", "mean T, tokens", lengths),
    ]
    if timeline.is_stale:
        panels.append(_plot(timeline, "Staleness", "Staleness", "mean age of a row, steps", {"": "staleness"}))
    return panels


def build_length_panels(timeline: Timeline) -> list[Panel]:
    """Build the panels of kept share and of row counts by length."""
    entries, places = timeline.lengths, range(len(timeline.lengths))
    x = Axis("T, response tokens of a row", ticks={at: format_bucket(one.bucket) for at, one in enumerate(entries)})
    lines: dict[str, Series] = {
        "rows kept": [one.kept_rows for one in entries],
        "tokens kept": [one.kept_tokens for one in entries],
    }
    merged = enumerate(merge_equal_series(lines).items())
    shares = [Mark(places, values, label, **style_line(at)) for at, (label, values) in merged]
    rows = Mark(places, [one.rows for one in entries], colour=MUTED, bar=0.7)
    alt, y = "Share of rows and tokens kept by response length", limit_shares(Axis("share"), shares)
    return [
        Panel("Share kept by length", alt, x, y, shares, columns=1),
        Panel("Rows by length", "Rows by response length", x, Axis("rows"), [rows]),
    ]


def _plot(timeline: Timeline, title: str, shown: str, unit: str, names: Mapping[str, str]) -> Panel:
    """Plot columns of a timeline, drawing equal columns as one line and labelling columns that were not recorded."""
    steps = timeline.get_column("step")
    columns = merge_equal_series({label: timeline.get_column(name) for label, name in names.items()})
    marks = []
    for at, (label, values) in enumerate(columns.items()):
        if (known := np.isfinite(values)).any():
            look = style_line(at, marker=len(steps) <= _MARKED)
            marks.append(Mark(steps[known], np.asarray(values)[known], label, **look))
    missing = "" if len(marks) == len(columns) else "not recorded"
    limits = (steps[0] - 1, steps[0] + 1) if len(steps) == 1 else None
    return Panel(title, f"{shown} by step", Axis("step", form="whole", limits=limits), Axis(unit), marks, missing)


def _limit_nats(panel: Panel) -> Panel:
    """Make the axis logarithmic if its values span powers of ten."""
    values = np.concatenate([np.asarray(mark.y) for mark in panel.marks if isinstance(mark, Mark)] or [np.zeros(0)])
    values = values[values > 0]
    wide = values.size and values.max() > _DECADES * values.min()
    return replace(panel, y=Axis(panel.y.label, log=10)) if wide else panel


def write_page(
    recording: Recording, timeline: Timeline, out: Path, studies: Studies | None = None, refresh: int = 0
) -> str:
    """Write the page, without secrets; return a sentence that describes the page and what was read.

    Args:
        studies: None for a run in progress, whose page has only the timeline.
        refresh: seconds after which a browser reloads the page; 0 for never.
    """
    card, proof = redact(recording.card), redact(recording.proof)
    spec = CorrectionSpec.from_mapping(timeline.correction)
    steps = list(dict.fromkeys(step.step for step in timeline.steps))
    count = "the one recorded step" if len(steps) == 1 else f"all {len(steps)} recorded steps"
    read = f"Read: {count} ({steps[0]} to {steps[-1]}). {studies.sampled if studies else ''}".rstrip()
    configuration = Code(json.dumps(card, indent=1, sort_keys=True, default=str))
    sections: Sections = {
        "Verdict": [build_table(build_answers(timeline, spec, proof, studies)), read],
        "Run and liveness proof": _run(card, proof, timeline, spec),
        "Reward and mismatch over time": _over_time(timeline),
        "Extensions": _extensions(card, timeline),
        "Kept share by length": _by_length(timeline),
        **(_tools(studies) if studies else {}),
        "Configuration": [Details("run.json", [configuration]) if card else "run.json was not recorded."],
    }
    subtitle = escape(f"{recording.directory}: {timeline.rows:,} responses")
    size = render.write_page(out, "Off-policy report", sections, subtitle, refresh)
    return f"{out}: {size:,} bytes. {read}"


def _describe_spec(spec: CorrectionSpec) -> dict[str, str]:
    """Describe a correction by its keys and by the effect of each part."""
    parts: dict[str, WeightSpec | MaskSpec] = {
        **spec.all_weights,
        **{f"masks.{name}": mask for name, mask in spec.masks},
    }
    text = {key: describe_part(part) for key, part in parts.items()} or {"correction": "none"}
    default = CorrectionSpec().to_mapping()
    settings = {key: value for key, value in spec.to_mapping().items() if key not in ("weight", "weights", "masks")}
    return text | {key: json.dumps(value) for key, value in settings.items() if value != default.get(key)}


def _run(card: Mapping[str, Any], proof: Mapping[str, Any], timeline: Timeline, spec: CorrectionSpec) -> list[Block]:
    facts = {name: escape(str(card[name])) for name in _CARD if name in card}
    if isinstance(sampling := card.get("sampling"), Mapping):
        facts["sampling"] = escape(", ".join(f"{name} {value}" for name, value in sampling.items()))
    facts |= {"responses": f"{timeline.rows:,}", "response tokens": f"{timeline.tokens:,}"}
    missing = "" if card else "run.json was not recorded: model, release and configuration are unknown."
    changed = ", ".join(map(str, timeline.changed[:10])) + (" ..." if len(timeline.changed) > 10 else "")
    moved = f"The correction changed during the run, before steps {changed}; the last one is shown." if changed else ""
    shown: Block = ""
    if isinstance(numbers := proof.get("live"), Mapping):
        shown = Details("The proof in numbers", [{escape(str(k)): _whole(v) for k, v in numbers.items()}])
    elif not spec.is_none:
        shown = "proof.json was not recorded, so there is no evidence that the correction reached the gradient."
    return [missing, facts | _describe_spec(spec), moved, shown]


def _whole(value: Any) -> Any:
    """Format whole floats without a decimal point, because counts and fingerprints are recorded as floats."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else value


def _thin_out(timeline: Timeline) -> Sequence[StepNumbers]:
    """Return every n-th step, so that a table has at most ``_LONGEST_TABLE`` rows."""
    return timeline.steps[:: max(1, -(-len(timeline.steps) // _LONGEST_TABLE))]


def _over_time(timeline: Timeline) -> list[Block]:
    columns = {
        "step": Column("step"),
        "rows": Column("responses"),
        "reward": Column("reward"),
        "length": Column("T", digits=1),
        "length_right": Column("T, right", digits=1),
        "length_wrong": Column("T, wrong", digits=1),
        "kl": Column("KL(mu, pi_old)", "nats", digits=6),
        "drift": Column("|log pi / pi_old|", "nats", digits=6),
        "staleness": Column("staleness", digits=2),
        "kept_tokens": Column("tokens kept"),
        "kept_rows": Column("rows kept"),
        "ess": Column("ESS"),
    }
    shown = _thin_out(timeline)
    rows = [[getattr(step, name) for name in columns] for step in shown]
    name = "Every step in numbers" if len(shown) == len(timeline.steps) else f"{len(shown)} of these steps in numbers"
    return [build_step_panels(timeline), Details(name, [Table(list(columns.values()), rows)])]


def _extensions(card: Mapping[str, Any], timeline: Timeline) -> list[Block]:
    if not (names := timeline.extensions):
        return []
    described = read_extensions(card)
    known = {name: what for each in described.values() for name, what in each["columns"].items()}
    facts = {section: each["meaning"] for section, each in described.items()}
    facts |= {name.removeprefix("offpolicy_"): str(known[name]) for name in names if name in known}
    rows = [(step.step, *(step.extensions.get(name, math.nan) for name in names)) for step in _thin_out(timeline)]
    columns = (Column("step"), *(Column(name.removeprefix("offpolicy_"), digits=4) for name in names))
    sentence = "Mean over response tokens of each column that an extension sent."
    return [{escape(name): escape(text) for name, text in facts.items()}, sentence, Table(columns, rows)]


def _by_length(timeline: Timeline) -> list[Block]:
    if not timeline.lengths:
        return ["No response has a token with a finite mu and pi_old."]
    columns = (Column("T", align="left"), Column("rows"), Column("rows kept"), Column("tokens kept"))
    rows = [(format_bucket(entry.bucket), entry.rows, entry.kept_rows, entry.kept_tokens) for entry in timeline.lengths]
    reasons = (Column("rejected by"), Column("share of tokens", digits=4))
    return [
        "Noise averages out in a geometric mean and adds up in a product. A mask on a geometric mean therefore "
        "rejects short rows, and a mask on a product rejects long rows.",
        build_length_panels(timeline) if len(timeline.lengths) > 1 else "",
        Table(columns, rows),
        Table(reasons, list(timeline.reasons.items())) if timeline.reasons else "",
    ]


def _tools(studies: Studies) -> Sections:
    """Build the sections of the three tools; a tool without a result is one sentence."""
    attributed, result, study = studies.attribution, studies.calibrated, studies.study
    calibration: list[Block] = [f"Not calibrated: {result}"]
    if not isinstance(result, str):
        new = f" Not active during the run: {', '.join(sorted(studies.new))}." if studies.new else ""
        calibration = [
            "" if isinstance(attributed, str) else attributed.mend_first,
            f"Bounds for a kept share of {TARGET_KEPT:g} (masks) and an ESS of {TARGET_ESS:g} (weight). The "
            f"{result.confidence:.0%} intervals treat rows of one prompt as dependent.{new}",
            *calibration_page.build_blocks(result),
        ]
    return {
        **(
            {"Causes": [f"Not attributed: {attributed}"]} if isinstance(attributed, str) else build_sections(attributed)
        ),
        "Calibration": calibration,
        "What other corrections would have done": (
            [f"Not replayed: {study}"] if isinstance(study, str) else whatif_page.build_blocks(study)
        ),
    }


def follow(
    directory: Path, out: Path, seconds: int, say: Callable[[str], None], wait: Callable[[float], None] = time.sleep
) -> None:
    """Write the page whenever a step is added, until this process is interrupted; each step is read only once.

    Args:
        directory: directory of the recording; it may not exist yet.
        out: the page, which a browser reloads every ``seconds``.
        say: called with a sentence each time the page is written, and once if there is nothing to read yet.

    Raises:
        RecordingError: a step is damaged.
    """
    read: dict[int, tuple[list[Path], list[Part]]] = {}
    waiting = False
    while True:
        try:
            recording = Recording(directory)
        except RecordingError as error:
            if list(directory.glob("step_*")):
                raise
            if not waiting:
                say(f"Waiting for the first step. {error}")
            waiting = True
        else:
            # Several ranks, and several updates, each add files to a step.
            new = [step for step in recording.steps if read.get(step, ([], []))[0] != recording.files[step]]
            for step in new:
                read[step] = recording.files[step], summarize_steps(recording.only(step))
            timeline = merge_parts(part for step in sorted(read) for part in read[step][1])
            if new and timeline.steps:
                say(write_page(recording, timeline, out, refresh=seconds))
        wait(seconds)
