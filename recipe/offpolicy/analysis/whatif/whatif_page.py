"""HTML page of a study."""

from __future__ import annotations

from pathlib import Path

from ..pages import Details, Page
from . import whatif_figures
from . import whatif_tables as tables
from .outcomes import Study

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


def build_page(study: Study) -> Page:
    """Build the page: all results, and the meaning of their columns."""
    result = Page("What if: other corrections on recorded steps", subtitle=study.directory)
    span = f"{study.steps[0]} to {study.steps[-1]} ({len(study.steps)})"
    facts = {"steps": span, "rows": study.rows, "response tokens": study.tokens}
    fidelity, left_out = tables.describe_fidelity(study.fidelity), tables.describe_left_out(len(study.outcomes))
    result.add_section("Replay", facts, fidelity, *study.notes, *left_out)
    result.add_section("Corrections", tables.build_overall_table(study), *whatif_figures.build_panels(study))
    result.add_section("Kept share", tables.build_group_table(study))
    result.add_section("Agreement", *tables.build_agreement_tables(study))
    if 1 < len(study.steps) <= _STEPS and len(study.outcomes) <= tables.MOST_COMPARED:
        fields = ("kept_tokens", "ess", "lr_scale")
        by_step = (Details(tables.OVERALL[name], [tables.build_step_table(study, name)]) for name in fields)
        result.add_section("By step", *by_step)
    result.add_section("Not replayed", tables.build_failure_table(study) if study.failures else "")
    result.add_section("What the columns mean", MEANINGS)
    return result


def write_page(study: Study, path: Path) -> int:
    """Write the page; return its size in bytes."""
    return build_page(study).write(path)
