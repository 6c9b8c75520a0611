"""Links and anchors of the pages, the order of the site, and generated pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.support import comparison_page, errors_page, keys_page
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "recipe" / "offpolicy" / "README.md"])
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")


def list_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as a git host and the site name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each) for each in re.findall(r"^#+ (.+)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link, anchor in LINK.findall(page.read_text()):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in list_anchors(target), f"{link}#{anchor}"


def test_the_site_has_every_page_once() -> None:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = [
        page if isinstance(page, str) else next(iter(page.values()))
        for each in sections
        for page in next(iter(each.values()))
    ]
    assert sorted(named) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_page_of_keys_is_as_the_tables_and_comments_are() -> None:
    assert keys_page.PAGE.read_text() == keys_page.build_page(), "python -m tests.support.keys_page rewrites it"


def test_the_page_of_errors_is_as_the_code_is() -> None:
    assert errors_page.PAGE.read_text() == errors_page.build_page(), "python -m tests.support.errors_page rewrites it"


def test_the_tables_of_the_comparison_are_as_the_facts_and_the_catalogue_are() -> None:
    """Our own column comes from the catalogue, so a cell that denies an existing feature is out of date."""
    page = comparison_page
    assert page.PAGE.read_text() == page.build_page(), "python -m tests.support.comparison_page rewrites them"
    assert page.list_unclaimed() == set(), "name them in `ours` of a feature in tests/data/peers.toml, or in here.other"
    assert [feature["name"] for feature in page.FACTS["feature"] if page.mark_own(feature) == "-"] == [
        *([] if page.has("key centering") else ["score centering"]),
        "bitwise equal engines",
    ]
    assert page.list_denied() == [], "this project has it: remove it from `ahead` in tests/data/peers.toml"
