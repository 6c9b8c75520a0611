"""Tables, sentences, panels and JSON document of a study."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...correction.statistics import BUCKETS
from .. import plotting
from ..page import Block, Details
from ..plotting import Axis, Mark, Panel, Rule, style_line
from ..table import Column, Table
from .candidates import RECORDED, UNCORRECTED
from .replay import Array
from .study import TOLERANCE, CorrectionOutcome, Fidelity, Study

OVERALL = {
    "kept_tokens": "tokens kept",
    "kept_rows": "rows kept",
    "mismatch_left": "mismatch left",
    "ess": "ESS",
    "lr_scale": "lr scale",
    "bias_token": "bias by token",
    "bias_token_systematic": "systematic part",
    "bias_sequence": "bias by row",
    "bias_sequence_systematic": "systematic part",
}
"""Field of ``CorrectionMeasures`` -> heading."""
MOST_COMPARED = 30
"""Largest number of corrections for which tables have one column each; more would make tables unreadable and pages too
large."""
_FAMILIES = ("length", "advantage", "staleness", "turn")


def shorten_label(label: str) -> str:
    """Drop the prefix that all overrides share: "[tis_token,gsm] masks.gsm.upper=1.01"."""
    parts = (part.removeprefix("correction.").removeprefix("correction=") for part in label.split(" "))
    return " ".join(parts)


def _build_overall_table(study: Study) -> Table:
    """Build the table of measures by correction; measures that no correction has are omitted."""
    keys = list(dict.fromkeys(key for outcome in study.outcomes for key in outcome.candidate.point))
    fields = [name for name in OVERALL if any(getattr(one.overall, name) is not None for one in study.outcomes)]
    columns = [Column("#"), Column("correction"), *(Column(shorten_label(key), align="right") for key in keys)]
    rows = [
        [
            *(place, shorten_label(outcome.candidate.base), *map(outcome.candidate.point.get, keys)),
            *(getattr(outcome.overall, name) for name in fields),
        ]
        for place, outcome in enumerate(study.outcomes)
    ]
    title = "What each correction would have done"
    return Table([*columns, *(Column(OVERALL[name]) for name in fields)], rows, title=title)


def list_groups(outcome: CorrectionOutcome) -> dict[str, str]:
    """Map each group to its heading, leaving out families with only one group, except lengths."""
    shares = collect_kept_shares(outcome)
    families = {family: [name for name in shares if name.startswith(f"{family}/")] for family in _FAMILIES}
    return {
        name: format_heading(name)
        for family, names in families.items()
        if len(names) > 1 or family == "length"
        for name in names
    }


def format_heading(group: str) -> str:
    """Format "length/le64" as "17-64", "advantage/negative" as "A < 0", "turn/ge3" as "turn 3+"."""
    family, name = group.split("/")
    if family == "length":
        names, most = list(BUCKETS), BUCKETS[name]
        place = names.index(name)
        below = (BUCKETS[names[place - 1]] or 0) if place else 0
        return f"> {below}" if most is None else f"{below + 1}-{most}"
    if family == "advantage":
        return {"positive": "A > 0", "negative": "A < 0"}[name]
    return f"{'age' if family == 'staleness' else family} {name[2:]}{'+' * name.startswith('ge')}"


def _build_group_table(study: Study) -> Table:
    """Build the table of tokens kept by length, sign of the advantage, staleness and turn."""
    names = list_groups(study.outcomes[0])
    shares = map(collect_kept_shares, study.outcomes)
    rows = [[f"#{place}", *map(of_groups.get, names)] for place, of_groups in enumerate(shares)]
    columns = [Column("#"), *(Column(text) for text in names.values())]
    return Table(columns, rows, title="Tokens kept by length, advantage A, staleness and turn")


def _build_step_table(study: Study, field: str) -> Table:
    """Build the table of one measure by step, with one column per correction."""
    columns = [Column("step"), *(Column(f"#{place}") for place in range(len(study.outcomes)))]
    rows = [[step, *(getattr(outcome.steps[step], field) for outcome in study.outcomes)] for step in study.steps]
    return Table(columns, rows, title=f"{OVERALL[field]} by step")


def _build_agreement_tables(study: Study) -> Iterator[Table]:
    """Yield agreement matrices; matrices of rejections cover only corrections that reject."""
    agreement = study.agreement
    rejecting = [
        place for place, outcome in enumerate(study.outcomes) if not math.isnan(agreement.jaccard_tokens[place, place])
    ]
    if len(rejecting) > 1:
        yield _matrix(agreement.jaccard_tokens, rejecting, "Rejected tokens in common (Jaccard)")
        yield _matrix(agreement.jaccard_rows, rejecting, "Rejected rows in common (Jaccard)")
    if len(study.outcomes) > 1:
        everything = list(range(len(study.outcomes)))
        yield _matrix(agreement.cosine, everything, "Cosine of the gradient weights")


def _describe_fidelity(fidelity: Fidelity) -> str:
    """Describe the comparison of the recorded correction with its replay."""
    if fidelity.agrees and not fidelity.tokens:
        return "The replay was not compared with the recording, because no recorded token has a finite mu and pi_old."
    tokens = f"{fidelity.tokens:,} tokens"
    if fidelity.agrees:
        return (
            f"The replay of the recorded correction agrees with the recording: {tokens}, identical decisions, weights "
            f"within a relative tolerance of {TOLERANCE:g} (largest difference {fidelity.weight_error:.1g})."
        )
    return (
        f"MISMATCH: the replay of the recorded correction differs in {fidelity.rejections:,} decisions and "
        f"{fidelity.weights:,} weights of {tokens}, so no figure on this page is reliable. Fix: replay with the "
        "release that made the recording."
    )


def collect_kept_shares(outcome: CorrectionOutcome) -> dict[str, float | None]:
    """Map each group to the kept share of its tokens."""
    shares = {name: group.kept_tokens for name, group in outcome.groups.items()}
    return shares | {name: share.kept_tokens for name, share in outcome.turns.items()}


def _matrix(values: Array, places: Sequence[int], title: str) -> Table:
    columns = [Column("#"), *(Column(f"#{place}") for place in places)]
    rows = [[f"#{row}", *(float(values[row, column]) for column in places)] for row in places]
    return Table(columns, rows, title=title)


MOST_LINES, _MOST_TICKS = 4, 8
"""Largest number of rows of panels (further corrections appear only in the tables), and of labelled grid values."""
_KEPT = {
    "kept_tokens": "tokens kept",
    "kept_rows": "rows kept",
    "ess": "ESS of weight x keep",
    "mismatch_left": "mismatch left",
}
_SCALE = {"lr_scale": "learning-rate scale"}
_BIAS = {
    "bias_token": "by token",
    "bias_token_systematic": "by token, systematic part",
    "bias_sequence": "by row",
    "bias_sequence_systematic": "by row, systematic part",
}


Series = Mapping[str, Sequence[float | None]]
"""A label -> the value of each correction."""


@dataclass(frozen=True)
class PanelRow:
    """One row of panels: corrections along one axis.

    Attributes:
        title: what its corrections have in common.
        label: label of the horizontal axis.
        ticks: the tick label of each correction.
        outcomes: outcomes in the order of the axis.
        ordered: whether the axis is numeric.
    """

    title: str
    label: str
    ticks: tuple[str, ...]
    outcomes: tuple[CorrectionOutcome, ...]
    ordered: bool


def _group_into_rows(study: Study) -> list[PanelRow]:
    """Group corrections into rows, one for each spec and value of the other keys; the last row contains the rest.

    The axis is the grid key with the most values.
    """
    bases: dict[str, list[CorrectionOutcome]] = {}
    for outcome in study.outcomes:
        if outcome.candidate.point:
            bases.setdefault(outcome.candidate.base, []).append(outcome)
    found = [line for outcomes in bases.values() for line in _split_base(outcomes)]
    rest = tuple(outcome for outcome in study.outcomes if not outcome.candidate.point)
    if not found or any(outcome.candidate.label not in (UNCORRECTED, RECORDED) for outcome in rest):
        ticks = tuple(shorten_label(outcome.candidate.label) for outcome in rest)
        found.append(PanelRow("", "", ticks, rest, ordered=False))
    return found


def _split_base(outcomes: Sequence[CorrectionOutcome]) -> Iterator[PanelRow]:
    """Yield the rows of one spec whose points all have the same keys."""
    keys = list(outcomes[0].candidate.point)
    axis = max(keys, key=lambda key: len({outcome.candidate.point[key] for outcome in outcomes}))
    along: dict[str, list[CorrectionOutcome]] = {}
    for outcome in outcomes:
        others = [f"{key}={value}" for key, value in outcome.candidate.point.items() if key != axis]
        along.setdefault(" ".join([outcome.candidate.base, *others]), []).append(outcome)

    def parse(outcome: CorrectionOutcome) -> float:
        try:
            return float(outcome.candidate.point[axis])
        except ValueError:
            return math.inf  # values that are not numbers, such as null, are sorted last

    for title, several in along.items():
        ordered = tuple(sorted(several, key=parse))
        ticks = tuple(outcome.candidate.point[axis] for outcome in ordered)
        yield PanelRow(shorten_label(title), shorten_label(axis), ticks, ordered, ordered=True)


def _build_panels(study: Study) -> list[list[Panel]]:
    """Build four panels for each of the first rows; corrections outside a grid are drawn as horizontal lines."""
    level = [outcome for outcome in study.outcomes if outcome.candidate.label == UNCORRECTED]
    return [_build_row(line, level if line.ordered else []) for line in _group_into_rows(study)[:MOST_LINES]]


def _build_row(line: PanelRow, level: Sequence[CorrectionOutcome]) -> list[Panel]:
    shares = [collect_kept_shares(outcome) for outcome in line.outcomes]
    headings = {name: text for name, text in list_groups(line.outcomes[0]).items() if name.startswith("length/")}
    by_length = {text: [share.get(name) for share in shares] for name, text in headings.items()}
    uncorrected = [
        Rule(value, "y", f"uncorrected, {_BIAS[name]}", plotting.PALETTE[colour])
        for outcome in level
        for name, colour in (("bias_token", 0), ("bias_sequence", 2))
        if (value := getattr(outcome.overall, name)) is not None
    ]
    full = Rule(1.0, "y" if line.ordered else "x")
    kept, scale, bias = (
        {label: [getattr(outcome.overall, name) for outcome in line.outcomes] for name, label in names.items()}
        for names in (_KEPT, _SCALE, _BIAS)
    )
    lengths, distance = "Share of tokens kept by length of the row", "Distance from unbiased weights"
    sample = "Share kept, mismatch left and effective sample size"
    return [
        _build_panel(line, "Tokens kept by length T", lengths, "share of the group's tokens", by_length, share=True),
        _build_panel(line, "Kept and effective sample", sample, "share", kept, share=True),
        _build_panel(
            line, "Effective learning rate", "Learning-rate scale", "share of the uncorrected scale", scale, [full]
        ),
        _build_panel(line, distance, distance, "relative distance", bias, uncorrected),
    ]


def _build_panel(
    line: PanelRow, title: str, alt: str, unit: str, series: Series, rules: Sequence[Rule] = (), *, share: bool = False
) -> Panel:
    numbers: dict[str, plotting.Series] = {
        label: [math.nan if value is None else value for value in values]
        for label, values in series.items()
        if any(value is not None for value in values)
    }
    styled = list(enumerate(plotting.merge_equal_series(numbers).items()))
    limits, places = _limit([*numbers.values(), [one.at for one in rules]], share=share), range(len(line.ticks))
    title = f"{title}, {line.title}" if line.title else title
    if not line.ordered:
        level = [Mark(values, places, label, **style_line(at) | {"dash": ""}) for at, (label, values) in styled]
        y = Axis(limits=(len(places) - 0.5, -0.5), ticks=dict(enumerate(line.ticks)))
        return Panel(title, alt, Axis(limits=limits), y, [*level, *rules], height=2.0 + 0.3 * len(places))
    marks = [Mark(places, values, label, **style_line(at)) for at, (label, values) in styled]
    ticks = {place: line.ticks[place] for place in places[:: math.ceil(len(places) / _MOST_TICKS)]}
    x = Axis(line.label, limits=(-0.4, len(places) - 0.6), ticks=ticks)
    return Panel(title, alt, x, Axis(unit, limits=limits), [*marks, *rules], height=4.2)


def _limit(series: Sequence[plotting.Series], *, share: bool) -> tuple[float, float]:
    """Limit the axis: for shares, from slightly below the smallest share to 1; for other values, from 0."""
    values = [value for one in series for value in map(float, one) if not math.isnan(value)]
    least, greatest = min(values, default=0.0), max(values, default=1.0)
    if not share:
        return min(0.0, least), greatest * 1.08 if greatest > 0 else 1.0
    low = max(0.0, math.floor((least - 0.03) * 20) / 20)
    return low, 1 + 0.03 * (1 - low)


_STEPS = 60
"""Maximum number of steps for which the per-step table is shown."""
MEANINGS = {
    "tokens kept, rows kept": "share of response tokens that receive a gradient, and share of rows with such a token.",
    "mismatch left": (
        "benefit of a mask: the share of KL(mu, pi), by k3 of pi/mu over tokens, that remains on tokens which still "
        "receive a gradient. The further it is below the share of tokens kept, the better the mask selects deviating "
        "tokens; with a random mask, the two shares would be equal."
    ),
    "ESS": "effective sample size of weight x keep: (sum w)^2 / (n sum w^2) over valid tokens, or rows.",
    "lr scale": (
        "norm of the corrected gradient weights f A, where f = weight x keep x r, divided by the norm of the "
        "uncorrected gradient weights r A. A is the advantage, and r is PPO's pi/pi_old, or 0 where PPO clips. This is "
        "the effect on the learning rate if token gradients had equal norms and were uncorrelated. With "
        "denominator=kept, f also contains the scale of that option."
    ),
    "bias by token": (
        "relative distance of the gradient weights from those with the untruncated pi/mu of each token: the largest "
        "possible error of a gradient (Cauchy-Schwarz), including noise that would average out."
    ),
    "bias by row": (
        "the same distance, but from the pi/mu of the whole row: this reference is unbiased, but for long rows it "
        "depends on only a few of them."
    ),
    "in common (Jaccard)": "share of the tokens or rows rejected by either correction that both corrections reject.",
    "systematic part": "the part of the distance that cannot average out: shifts of the mean by length and sign of A.",
}


def describe_scope(study: Study) -> str:
    """Describe what was replayed, in one line."""
    left = len(_group_into_rows(study)) - MOST_LINES
    more = f"; {left} more rows of panels appear only in the tables" if left > 0 else ""
    steps = f"steps {study.steps[0]} to {study.steps[-1]} ({len(study.steps)})"
    return f"{study.directory}: {steps}, {study.rows:,} rows, {study.tokens:,} tokens{more}"


def build_blocks(study: Study) -> list[Block]:
    """Build all tables, panels and sentences, and the meaning of the columns."""
    few = len(study.outcomes) <= MOST_COMPARED
    left_out = (
        f"Agreement tables and per-step tables are shown for at most {MOST_COMPARED} corrections; --json includes "
        f"all of them."
    )
    by_step = ("kept_tokens", "ess", "lr_scale") if few and 1 < len(study.steps) <= _STEPS else ()
    failures = [[shorten_label(label), reason] for label, reason in study.failures.items()]
    columns = [Column("correction"), Column("not replayed, because")]
    return [
        *(_describe_fidelity(study.fidelity), *study.notes, "" if few else left_out),
        *((_build_overall_table(study), *_build_panels(study), _build_group_table(study)) if study.outcomes else ()),
        *(_build_agreement_tables(study) if few else ()),
        *(Details(OVERALL[name], [_build_step_table(study, name)]) for name in by_step),
        Table(columns, failures, title="Not replayed") if failures else "",
        Details("What the columns mean", [MEANINGS]),
    ]


SCHEMA = 1


def build_document(study: Study) -> dict[str, Any]:
    """Build the JSON document from plain values.

    Keys:

    * ``schema``: 1; increases whenever a key is removed or changes its meaning.
    * ``recording``: ``directory``, ``steps`` (list), ``rows``, ``tokens`` (response tokens).
    * ``fidelity``: comparison of the recorded correction's replay with the recording: ``agrees`` (null if there was no
      comparison), ``tolerance``, and the fields of ``Fidelity``.
    * ``corrections``: a list of
        * ``label``, ``base`` and ``point`` (the values of the grid keys);
        * ``spec``: plain values; null if the correction is the one recorded at each step;
        * ``overall``, ``groups`` (``length/le64``, ``advantage/negative``, ``staleness/is1``) and ``steps`` (by
          number): the fields of ``CorrectionMeasures``; null where a measure is not possible;
        * ``turns`` (``turn/is0``): the fields of ``TurnShare``.
    * ``agreement``: ``labels`` and, in their order, the matrices of ``Agreement``; null where undefined.
    * ``failures``: label -> why the correction was not replayed.
    * ``notes``: limitations of the figures.
    """
    agrees = study.fidelity.agrees and (True if study.fidelity.tokens else None)
    matrices = {name: matrix.tolist() for name, matrix in vars(study.agreement).items()}
    corrections = [
        {
            **{name: getattr(outcome.candidate, name) for name in ("label", "base", "point")},
            "spec": None if outcome.candidate.spec is None else outcome.candidate.spec.to_mapping(),
            **{name: getattr(outcome, name) for name in ("overall", "groups", "turns", "steps")},
        }
        for outcome in study.outcomes
    ]
    return {
        "schema": SCHEMA,
        "recording": {name: getattr(study, name) for name in ("directory", "steps", "rows", "tokens")},
        "fidelity": {"agrees": agrees, "tolerance": TOLERANCE, **vars(study.fidelity)},
        "corrections": corrections,
        "agreement": {"labels": [outcome.candidate.label for outcome in study.outcomes], **matrices},
        "failures": study.failures,
        "notes": study.notes,
    }
