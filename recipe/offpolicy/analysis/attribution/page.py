"""An attribution as sections of a page."""

from __future__ import annotations

from ..pages import Page, details, keys, panels, paragraph, table
from . import figures, tables
from .attribution import Attribution
from .text import escaped

HOW = (
    "log pi/mu of each token is backend + staleness + drift. Shares of variance are covariances with the whole, so "
    "that they sum to 1; a negative one works against the others. Shares of KL are what k3 of the sum grows by with "
    "each part, in this order. What the backend alone does to stale rows is taken from fresh rows at the same "
    "probability, because nobody has scored them with the weights that sampled them; without fresh rows it is not "
    "identified. Staleness goes by the versions that verl notes: where the causes find older weights that none of them "
    "tells of, backend and staleness stay together. Where the run took mu or a mixture for pi_old "
    "(correction.proximal of bypass or loglinear), pi at a step's first gradient step stands in, as no update has "
    "moved it. Rows of later ones are left out: shares are then of KL(mu, pi_old), and drift is not identified."
)


def add_sections(page: Page, attribution: Attribution) -> None:
    """Causes, shares, pictures and the worst examples."""
    fixes = (paragraph(f"Fix of {fix}") for fix in tables.fixes(attribution))
    page.section("Causes", paragraph(tables.verdict(attribution)), *fixes, table(tables.causes_table(attribution)))
    page.section(
        "Where the mismatch comes from",
        paragraph(HOW),
        table(tables.shares_table(attribution.whole)),
        panels(figures.panels(attribution)),
        table(tables.versions_table(attribution)),
        details("Every step", table(tables.steps_table(dict(attribution.by_step)))),
        details(
            "Profiles in numbers",
            *(table(tables.profile_table(name, buckets)) for name, buckets in attribution.profiles.items()),
        ),
    )
    note = f"Ids in place of text: {attribution.without_text}." if attribution.without_text else ""
    page.section(
        "Worst examples",
        paragraph(f"By k3 of log pi/mu. {note}"),
        table(tables.tokens_table(attribution)),
        table(tables.rows_table(attribution)),
    )


def page_of(attribution: Attribution, source: str) -> Page:
    """A page of its own."""
    page = Page("Where does the mismatch come from?", escaped(source))
    page.section(
        "Recording",
        keys(
            {
                "steps": f"{attribution.steps[0]} to {attribution.steps[-1]}",
                "rows": attribution.rows,
                "tokens": attribution.whole.tokens,
                "KL(mu, pi), nats a token": attribution.whole.kl.whole,
                "variance of log pi/mu": attribution.whole.variance.whole,
            }
        ),
    )
    add_sections(page, attribution)
    return page
