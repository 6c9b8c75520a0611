"""Tables, sentences, figures and HTML page of a study."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...correction.statistics import BUCKETS
from .. import plotting
from ..page import Details, Page
from ..plotting import Axis, Mark, Panel, Rule, style_line
from ..table import Column, Table
from .candidates import RECORDED, UNCORRECTED
from .outcomes import TOLERANCE, CorrectionOutcome, Fidelity, Matrix, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def build_overall_table(study: Study) -> Table:
    """Build the table of measures by correction; measures that no correction has are left out."""
    keys = _grid_keys(study)
    columns = [Column("#"), Column("correction"), *(Column(shorten_label(key), align="right") for key in keys)]
    fields = [name for name in OVERALL if any(getattr(one.overall, name) is not None for one in study.outcomes)]
    columns += [Column(OVERALL[name]) for name in fields]
    rows = []
    for place, outcome in enumerate(study.outcomes):
        candidate = outcome.candidate
        point = [candidate.point.get(key) for key in keys]
        rows.append(
            [place, shorten_label(candidate.base), *point, *(getattr(outcome.overall, name) for name in fields)]
        )
    return Table(columns, rows, title="What each correction would have done")


def list_groups(outcome: CorrectionOutcome) -> dict[str, str]:
    """Map each group to its heading, leaving out families with only one group, except lengths."""
    names: dict[str, str] = {}
    for family in _FAMILIES:
        groups = [name for name in collect_kept_shares(outcome) if name.startswith(f"{family}/")]
        if len(groups) > 1 or family == "length":
            names |= {name: format_heading(name) for name in groups}
    return names


def format_heading(group: str) -> str:
    """Format "length/le64" as "17-64", "advantage/negative" as "A < 0", "turn/ge3" as "turn 3+"."""
    family, name = group.split("/")
    if family == "length":
        return _span(name)
    if family == "advantage":
        return {"positive": "A > 0", "negative": "A < 0"}[name]
    family = {"staleness": "age"}.get(family, family)
    return f"{family} {name[2:]}+" if name.startswith("ge") else f"{family} {name[2:]}"


def build_group_table(study: Study) -> Table:
    """Build the table of tokens kept by length, sign of the advantage, staleness and turn."""
    names = list_groups(study.outcomes[0])
    rows = []
    for place, outcome in enumerate(study.outcomes):
        groups = collect_kept_shares(outcome)
        rows.append([f"#{place}", *(groups.get(name) for name in names)])
    columns = [Column("#"), *(Column(text) for text in names.values())]
    return Table(columns, rows, title="Tokens kept by length, advantage A, staleness and turn")


def build_step_table(study: Study, field: str) -> Table:
    """Build the table of one measure by step, with one column per correction."""
    columns = [Column("step"), *(Column(f"#{place}") for place in range(len(study.outcomes)))]
    rows = [[step, *(getattr(outcome.steps[step], field) for outcome in study.outcomes)] for step in study.steps]
    return Table(columns, rows, title=f"{OVERALL[field]} by step")


def describe_left_out(corrections: int) -> list[str]:
    """Describe which tables are left out for this many corrections; empty if all tables are shown."""
    if corrections <= MOST_COMPARED:
        return []
    return [
        f"{corrections} corrections are more than {MOST_COMPARED}: no tables of their agreement or by step are shown. "
        f"--json contains both."
    ]


def build_agreement_tables(study: Study) -> Iterator[Table]:
    """Yield agreement matrices of up to ``MOST_COMPARED`` corrections; on rejections, only for those that reject."""
    if len(study.outcomes) > MOST_COMPARED:
        return
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


def build_failure_table(study: Study) -> Table:
    """Build the table of corrections that could not be replayed, and why."""
    rows = [[shorten_label(label), reason] for label, reason in study.failures.items()]
    return Table([Column("correction"), Column("not replayed, because")], rows, title="Not replayed")


def describe_fidelity(fidelity: Fidelity) -> str:
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
        f"MISMATCH: the replay of the recorded correction differs from the recording in "
        f"{fidelity.rejections:,} decisions and {fidelity.weights:,} weights of {tokens}. "
        f"The recording and this code disagree, so no figure here is credible. "
        f"Fix: replay with the release that made the recording."
    )


def _grid_keys(study: Study) -> list[str]:
    return list(dict.fromkeys(key for outcome in study.outcomes for key in outcome.candidate.point))


def collect_kept_shares(outcome: CorrectionOutcome) -> dict[str, float | None]:
    """Map each group to the kept share of its tokens."""
    shares = {name: group.kept_tokens for name, group in outcome.groups.items()}
    return shares | {name: share.kept_tokens for name, share in outcome.turns.items()}


def _span(bucket: str) -> str:
    names = list(BUCKETS)
    place = names.index(bucket)
    least = (BUCKETS[names[place - 1]] or 0) + 1 if place else 1
    most = BUCKETS[bucket]
    return f"{least}-{most}" if most is not None else f"> {least - 1}"


def _matrix(values: Matrix, places: Sequence[int], title: str) -> Table:
    columns = [Column("#"), *(Column(f"#{place}") for place in places)]
    rows = [[f"#{row}", *(float(values[row, column]) for column in places)] for row in places]
    return Table(columns, rows, title=title)


MOST_LINES = 4
"""Largest number of rows of panels; further corrections appear only in the tables."""
_MOST_TICKS = 8
"""Largest number of grid values that are labelled in words below a panel."""
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


def group_into_rows(study: Study) -> list[PanelRow]:
    """Group corrections into rows, one for each spec and value of the other keys; the last row contains the rest.

    The axis is the grid key with the most values.
    """
    bases: dict[str, list[CorrectionOutcome]] = {}
    for outcome in study.outcomes:
        if outcome.candidate.point:
            bases.setdefault(outcome.candidate.base, []).append(outcome)
    found = [line for outcomes in bases.values() for line in _of_base(outcomes)]
    rest = [outcome for outcome in study.outcomes if not outcome.candidate.point]
    if not found or any(outcome.candidate.label not in (UNCORRECTED, RECORDED) for outcome in rest):
        ticks = tuple(shorten_label(outcome.candidate.label) for outcome in rest)
        found.append(PanelRow("", "", ticks, tuple(rest), ordered=False))
    return found


def _of_base(outcomes: Sequence[CorrectionOutcome]) -> list[PanelRow]:
    """Build the rows of one spec whose points all have the same keys."""
    keys = list(outcomes[0].candidate.point)
    axis = max(keys, key=lambda key: len({outcome.candidate.point[key] for outcome in outcomes}))
    along: dict[str, list[CorrectionOutcome]] = {}
    for outcome in outcomes:
        others = [f"{key}={value}" for key, value in outcome.candidate.point.items() if key != axis]
        along.setdefault(" ".join([outcome.candidate.base, *others]), []).append(outcome)
    return [_along(title, axis, several) for title, several in along.items()]


def draw_study(study: Study) -> Figure:
    """Draw all panels in one figure, two side by side; corrections outside a grid are drawn as horizontal lines."""
    drawn = build_panels(study)
    return plotting.draw_panels([panel for line in drawn for panel in line], columns=2, title=_title(study, len(drawn)))


def build_panels(study: Study) -> list[list[Panel]]:
    """Build the four panels of each row."""
    level = [outcome for outcome in study.outcomes if outcome.candidate.label == UNCORRECTED]
    return [_build_row(line, level if line.ordered else []) for line in group_into_rows(study)[:MOST_LINES]]


def _build_row(line: PanelRow, level: Sequence[CorrectionOutcome]) -> list[Panel]:
    by_group, title = _collect_groups(line)
    uncorrected = [
        Rule(value, "y", f"uncorrected, {_BIAS[name]}", plotting.PALETTE[colour])
        for outcome in level
        for name, colour in (("bias_token", 0), ("bias_sequence", 2))
        if (value := getattr(outcome.overall, name)) is not None
    ]
    full = Rule(1.0, "y" if line.ordered else "x")
    kept, scale, bias = (_collect(line, names) for names in (_KEPT, _SCALE, _BIAS))
    return [
        _build_panel(
            line,
            title,
            "Share of tokens kept by length of the row or group",
            "share of the group's tokens",
            by_group,
            share=True,
        ),
        _build_panel(
            line,
            "Kept and effective sample",
            "Share kept, mismatch left and effective sample size",
            "share",
            kept,
            share=True,
        ),
        _build_panel(
            line,
            "Effective learning rate",
            "Learning-rate scale",
            "share of the uncorrected scale",
            scale,
            [full],
        ),
        _build_panel(
            line,
            "Distance from unbiased weights",
            "Distance from unbiased weights",
            "relative distance",
            bias,
            uncorrected,
        ),
    ]


def _collect_groups(line: PanelRow) -> tuple[Series, str]:
    """Collect kept shares by length or, if all rows have the same length, by the groups that split the tokens."""
    names = list_groups(line.outcomes[0])
    lengths = [name for name in names if name.startswith("length/")]
    if len(lengths) < 2:
        lengths = [name for name in names if name not in lengths] or lengths
    shares = [collect_kept_shares(outcome) for outcome in line.outcomes]
    by_length = all(name.startswith("length/") for name in lengths)
    found = {names[name]: [share.get(name) for share in shares] for name in lengths}
    return found, f"Tokens kept by {'length T' if by_length else 'group'}"


def _collect(line: PanelRow, names: Mapping[str, str]) -> Series:
    return {label: [getattr(outcome.overall, name) for outcome in line.outcomes] for name, label in names.items()}


def _build_panel(
    line: PanelRow, title: str, alt: str, unit: str, series: Series, rules: Sequence[Rule] = (), *, share: bool = False
) -> Panel:
    numbers: dict[str, plotting.Series] = {
        label: [math.nan if value is None else value for value in values]
        for label, values in series.items()
        if any(value is not None for value in values)
    }
    places = range(len(line.ticks))
    marks: list[Mark] = []
    for at, (label, values) in enumerate(plotting.merge_equal_series(numbers).items()):
        x, y = (places, values) if line.ordered else (values, places)
        marks.append(Mark(x, y, label, **style_line(at) | ({} if line.ordered else {"dash": ""})))
    of_values = Axis(
        unit if line.ordered else "", limits=_limit([*numbers.values(), [one.at for one in rules]], share=share)
    )
    # Ceiling division.
    every = -(-len(places) // _MOST_TICKS) if line.ordered else 1
    ticks = {place: line.ticks[place] for place in places[::every]}
    of_places = Axis(
        line.label, limits=(-0.4, len(places) - 0.6) if line.ordered else (len(places) - 0.5, -0.5), ticks=ticks
    )
    return Panel(
        f"{title}, {line.title}" if line.title else title,
        alt,
        of_places if line.ordered else of_values,
        of_values if line.ordered else of_places,
        [*marks, *rules],
        height=4.2 if line.ordered else 2.0 + 0.3 * len(line.ticks),
    )


def _limit(series: Sequence[plotting.Series], *, share: bool) -> tuple[float, float]:
    """Limit the axis: for shares, from slightly below the smallest share to 1; for other values, from 0."""
    values = [value for one in series for value in map(float, one) if not math.isnan(value)]
    least, greatest = min(values, default=0.0), max(values, default=1.0)
    if not share:
        return min(0.0, least), greatest * 1.08 if greatest > 0 else 1.0
    low = max(0.0, math.floor((least - 0.03) * 20) / 20)
    return low, 1 + 0.03 * (1 - low)


def _along(title: str, axis: str, outcomes: Sequence[CorrectionOutcome]) -> PanelRow:
    def number(outcome: CorrectionOutcome) -> float:
        try:
            return float(outcome.candidate.point[axis])
        except ValueError:
            # Values that are not numbers, such as null, are sorted last.
            return math.inf

    ordered = sorted(outcomes, key=number)
    ticks = tuple(outcome.candidate.point[axis] for outcome in ordered)
    return PanelRow(
        _in_words(shorten_label(title)), _name_key(shorten_label(axis)), ticks, tuple(ordered), ordered=True
    )


def _in_words(correction: str) -> str:
    """Write ``[tis_token,gsm] weight.upper=2`` as ``tis_token and gsm, upper bound of weight = 2``."""
    options, *keys = correction.split(" ")
    named = [f"{_name_key(key)} = {value}" for key, _, value in (each.partition("=") for each in keys)]
    return ", ".join([" and ".join(options.strip("[]").split(",")), *named])


def _name_key(key: str) -> str:
    """Write ``masks.gsm.upper`` as ``upper bound of gsm``; other keys stay as they are."""
    *owner, name = key.split(".")
    known = {"upper": "upper bound", "lower": "lower bound", "delta": "delta", "budget": "budget"}
    return f"{known[name]} of {owner[-1]}" if owner and name in known else key


def _title(study: Study, drawn: int) -> str:
    steps = f"steps {study.steps[0]} to {study.steps[-1]}" if len(study.steps) > 1 else f"step {study.steps[0]}"
    left = len(group_into_rows(study)) - drawn
    more = f"; {left} more rows of panels appear only in the tables" if left else ""
    return f"{study.directory}: {steps}, {study.rows:,} rows, {study.tokens:,} tokens{more}"


_STEPS = 60
"""Largest number of steps for which the table by step is shown."""
MEANINGS = {
    "tokens kept, rows kept": (
        "share of response tokens that receive a gradient, and of rows with at least one such token."
    ),
    "mismatch left": (
        "benefit of a mask: the share of KL(mu, pi), by k3 of pi/mu over tokens, that remains on tokens which still "
        "receive a gradient. The further it is below the share of tokens kept, the better the mask selects deviating "
        "tokens; with a random mask, the two shares would be equal."
    ),
    "ESS": "effective sample size of weight x keep: (sum w)^2 / (n sum w^2) over valid tokens, or rows.",
    "lr scale": (
        "norm of the corrected gradient weights f A = weight x keep x r x advantage relative to the norm of the "
        "uncorrected r A. Here r is PPO's pi/pi_old, or 0 where PPO clips, and denominator=kept multiplies f by its "
        "scale. The result is the effect on the learning rate if token gradients were equal in size and unrelated."
    ),
    "bias by token": (
        "relative distance of the gradient weights from those with the untruncated pi/mu of each token: the largest "
        "possible error of a gradient (Cauchy-Schwarz), including noise that would average out."
    ),
    "bias by row": (
        "the same distance, but with pi/mu of the whole row, which is the unbiased weight of the policy gradient; if "
        "rows are long, it depends on only a few of them."
    ),
    "in common (Jaccard)": "of the tokens or rows that either correction rejects, the share that both reject.",
    "systematic part": (
        "the part of that distance that cannot average out: shifts of the mean by length bucket and sign of the "
        "advantage."
    ),
}


def build_page(study: Study) -> Page:
    """Build the page: all results, and the meaning of their columns."""
    result = Page("What if: other corrections on recorded steps", subtitle=study.directory)
    span = f"{study.steps[0]} to {study.steps[-1]} ({len(study.steps)})"
    facts = {"steps": span, "rows": study.rows, "response tokens": study.tokens}
    fidelity, left_out = describe_fidelity(study.fidelity), describe_left_out(len(study.outcomes))
    result.add_section("Replay", facts, fidelity, *study.notes, *left_out)
    result.add_section("Corrections", build_overall_table(study), *build_panels(study))
    result.add_section("Kept share", build_group_table(study))
    result.add_section("Agreement", *build_agreement_tables(study))
    if 1 < len(study.steps) <= _STEPS and len(study.outcomes) <= MOST_COMPARED:
        fields = ("kept_tokens", "ess", "lr_scale")
        by_step = (Details(OVERALL[name], [build_step_table(study, name)]) for name in fields)
        result.add_section("By step", *by_step)
    result.add_section("Not replayed", build_failure_table(study) if study.failures else "")
    result.add_section("What the columns mean", MEANINGS)
    return result


def write_page(study: Study, path: Path) -> int:
    """Write the page; return its size in bytes."""
    return build_page(study).write(path)
