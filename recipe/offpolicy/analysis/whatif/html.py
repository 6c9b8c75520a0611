"""A study as one self-contained page."""

from __future__ import annotations

from pathlib import Path

from .. import pages
from . import draw, show
from .results import Study

_STEPS = 60
"""Steps up to which the table by step is shown."""
MEANINGS = {
    "tokens kept, rows kept": "share of response tokens, and of rows with a token, that get a gradient.",
    "mismatch left": (
        "what a mask buys: the share of KL(mu, pi), by k3 of pi/mu over tokens, that lies on tokens which still get a "
        "gradient. The further below tokens kept, the better the mask picks the tokens that are off; the same share "
        "is what chance would leave."
    ),
    "ESS": "effective sample size of weight x keep: (sum w)^2 / (n sum w^2) over valid tokens, or rows.",
    "lr scale": (
        "norm of the corrected gradient weights f A = weight x keep x r x advantage against the uncorrected r A, "
        "where r is PPO's pi/pi_old, 0 where PPO clips, and denominator=kept multiplies f by its scale: what the "
        "correction does to the learning rate, were token gradients of one size and unrelated."
    ),
    "projection": "what is left of the uncorrected gradient weights in their own direction, signed.",
    "bias by token": (
        "distance of the gradient weights from those with the untruncated pi/mu of each token, relative: the most that "
        "any gradient can be off by (Cauchy-Schwarz); noise that would average out counts."
    ),
    "bias by row": (
        "likewise with pi/mu of the whole row, the unbiased weight of the policy gradient; on long rows it rests on "
        "few of them."
    ),
    "in common (Jaccard)": "of what either of two corrections rejects, the share that both reject.",
    "of it shift": (
        "the part of that distance that cannot average out: shifts of the mean by length bucket and sign of the "
        "advantage."
    ),
}


def page(study: Study) -> pages.Page:
    """Everything that was found, and what it means."""
    result = pages.Page("What if: other corrections on recorded steps", subtitle=study.directory)
    span = f"{study.steps[0]} to {study.steps[-1]} ({len(study.steps)})"
    facts = {"steps": span, "rows": study.rows, "response tokens": study.tokens}
    result.section(
        "Replay",
        pages.keys(facts),
        pages.paragraph(show.fidelity_sentence(study.fidelity)),
        *(pages.paragraph(note) for note in [*study.notes, *show.left_out(len(study.outcomes))]),
    )
    result.section(
        "Corrections",
        pages.table(show.overall_table(study)),
        *(pages.panels(line) for line in draw.panels(study)),
    )
    result.section("Kept share", pages.table(show.group_table(study)))
    if agreement := list(show.agreement_tables(study)):
        result.section("Agreement", *(pages.table(table) for table in agreement))
    if 1 < len(study.steps) <= _STEPS and len(study.outcomes) <= show.MOST_COMPARED:
        fields = ("kept_tokens", "ess", "lr_scale")
        by_step = [pages.details(show.OVERALL[name], pages.table(show.step_table(study, name))) for name in fields]
        result.section("By step", *by_step)
    if study.failures:
        result.section("Not replayed", pages.table(show.failure_table(study)))
    result.section("What the columns mean", pages.keys(MEANINGS))
    return result


def write(study: Study, path: Path) -> int:
    """Returns the size of the page in bytes."""
    return page(study).write(path)
