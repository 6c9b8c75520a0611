"""HTML page of an attribution."""

from __future__ import annotations

from ..pages import Details, Page
from . import attribution_figures, attribution_tables
from .attribution import Attribution
from .token_text import escape

METHOD = (
    "log pi/mu of each token is backend + staleness + drift. Where expert routes are replayed and log pi_old was "
    "recorded without replay as well, routing is what the trainer's own routes add to it, and the whole is log pi/mu "
    "as it would be without replay: backend + staleness + routing + drift. Shares of variance are covariances with the "
    "whole, so that they sum to 1; a negative one works against the others. Shares of KL are the increments of k3 of "
    "the sum with each part, in this order. The backend's part of stale rows is estimated from fresh rows at the same "
    "probability, because the trainer runs no forward pass at the weights that sampled them; without fresh rows it is "
    "not identified. Staleness is by the versions that verl records: where the causes show older weights that the "
    "versions do not, backend and staleness stay together. Where the run took mu or a mixture for pi_old "
    "(correction.proximal of bypass, same_engine or loglinear), pi at a step's first gradient step stands in, as no "
    "update has moved it. Rows of later ones are left out: shares are then of KL(mu, pi_old), and drift is not "
    "identified."
)


def add_sections(page: Page, attribution: Attribution) -> None:
    """Add causes, shares, figures and the worst examples to a page."""
    fixes = (f"Fix of {fix}" for fix in attribution_tables.list_fixes(attribution))
    causes = attribution_tables.build_causes_table(attribution)
    page.add_section("Causes", attribution_tables.format_verdict(attribution), *fixes, causes)
    page.add_section(
        "Where the mismatch comes from",
        METHOD,
        attribution_tables.build_shares_table(attribution.whole),
        attribution_tables.format_replayed(attribution.whole),
        attribution_figures.build_panels(attribution),
        attribution_tables.build_versions_table(attribution),
        Details("Every step", [attribution_tables.build_steps_table(dict(attribution.by_step))]),
        Details("Profiles in numbers", attribution_tables.build_profile_tables(attribution)),
    )
    note = f"Ids instead of text: {attribution.without_text}." if attribution.without_text else ""
    examples = (attribution_tables.build_tokens_table(attribution), attribution_tables.build_rows_table(attribution))
    page.add_section("Worst examples", f"By k3 of log pi/mu. {note}", *examples)


def build_page(attribution: Attribution, source: str) -> Page:
    """Build a page that holds the attribution alone."""
    page = Page("Where does the mismatch come from?", escape(source))
    facts = {
        "steps": f"{attribution.steps[0]} to {attribution.steps[-1]}",
        "rows": attribution.rows,
        "tokens": attribution.whole.tokens,
        "KL(mu, pi), nats a token": attribution.whole.kl.whole,
        "variance of log pi/mu": attribution.whole.variance.whole,
    }
    page.add_section("Recording", facts)
    add_sections(page, attribution)
    return page
