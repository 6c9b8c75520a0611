"""Tables and sentences of a study."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...correction.statistics import BUCKETS
from ..pages import Column, Table
from .agreement import TOLERANCE, Fidelity, Matrix
from .outcomes import CorrectionOutcome, Study

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
"""Number of corrections up to which tables have a column for each; more would be unreadable and the page too large."""
_FAMILIES = ("length", "advantage", "staleness", "turn")


def shorten_label(label: str) -> str:
    """Drop the prefix that all overrides share: "[tis_token,gsm] masks.gsm.upper=1.01"."""
    parts = (part.removeprefix("correction.").removeprefix("correction=") for part in label.split(" "))
    return " ".join(parts)


def build_overall_table(study: Study) -> Table:
    """Build the table of measures by correction; a measure that no correction has is left out."""
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
    """Map each group to its heading; a family with a single group is left out, except for lengths."""
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
    """Report which tables are left out for this many corrections; empty if all are shown."""
    if corrections <= MOST_COMPARED:
        return []
    return [
        f"{corrections} corrections are more than {MOST_COMPARED}: no tables of their agreement or by step are shown. "
        f"--json contains both."
    ]


def build_agreement_tables(study: Study) -> Iterator[Table]:
    """Yield matrices over pairs of up to ``MOST_COMPARED`` corrections, for rejections only of those that reject."""
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
        return "Not compared: no recorded token has a finite mu and pi_old for comparing the replay."
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
    """Map each group to the share of its tokens that is kept."""
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
