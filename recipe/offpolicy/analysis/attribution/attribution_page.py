"""HTML page of an attribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..pages import Page, render_details, render_keys, render_panels, render_paragraph, render_table
from . import attribution_figures, attribution_tables
from .attribution import Attribution
from .token_text import escape

if TYPE_CHECKING:
    from markupsafe import Markup


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
    fixes = (render_paragraph(f"Fix of {fix}") for fix in attribution_tables.list_fixes(attribution))
    page.add_section(
        "Causes",
        render_paragraph(attribution_tables.format_verdict(attribution)),
        *fixes,
        render_table(attribution_tables.build_causes_table(attribution)),
    )
    page.add_section(
        "Where the mismatch comes from",
        render_paragraph(METHOD),
        render_table(attribution_tables.build_shares_table(attribution.whole)),
        *render_replayed(attribution),
        render_panels(attribution_figures.build_panels(attribution)),
        render_table(attribution_tables.build_versions_table(attribution)),
        render_details("Every step", render_table(attribution_tables.build_steps_table(dict(attribution.by_step)))),
        render_details(
            "Profiles in numbers",
            *(
                render_table(attribution_tables.build_profile_table(name, buckets))
                for name, buckets in attribution.profiles.items()
            ),
        ),
    )
    note = f"Ids in place of text: {attribution.without_text}." if attribution.without_text else ""
    page.add_section(
        "Worst examples",
        render_paragraph(f"By k3 of log pi/mu. {note}"),
        render_table(attribution_tables.build_tokens_table(attribution)),
        render_table(attribution_tables.build_rows_table(attribution)),
    )


def render_replayed(attribution: Attribution) -> list[Markup]:
    """Render the sentence on KL with replay of routes and without; nothing where that is not recorded."""
    said = attribution_tables.format_replayed(attribution.whole)
    return [render_paragraph(said)] if said else []


def build_page(attribution: Attribution, source: str) -> Page:
    """Build a page that holds the attribution alone."""
    page = Page("Where does the mismatch come from?", escape(source))
    page.add_section(
        "Recording",
        render_keys(
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
