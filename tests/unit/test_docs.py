"""Links in the pages lead to files of the repository, and generated pages are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import comparison_page, keys_page
from tests.support.paths import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "recipe" / "offpolicy" / "README.md"])
PINS = sorted((ROOT / "tests/conformance/requirements").glob("*.txt"))
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


def test_the_page_of_keys_is_as_the_tables_and_comments_are() -> None:
    assert keys_page.PAGE.read_text() == keys_page.build_page(), "python -m tests.support.keys_page rewrites it"


def test_the_page_of_the_library_names_the_releases_that_are_compared() -> None:
    pins = [path.read_text().split()[0].replace("==", " ") for path in PINS]
    page = " ".join((ROOT / "docs/library.md").read_text().split())
    assert len(pins) > 5
    assert not [pin for pin in pins if pin not in page]


def test_the_tables_of_the_comparison_are_as_the_facts_and_the_catalogue_are() -> None:
    """Our own column comes from the catalogue, so that a cell that denies what it has is out of date."""
    page = comparison_page
    assert page.PAGE.read_text() == page.build_page(), "python -m tests.support.comparison_page rewrites them"
    assert page.list_unclaimed() == set(), "name them in `ours` of a feature in tests/data/peers.toml, or in here.other"
    assert [feature["name"] for feature in page.FACTS["feature"] if page.mark_own(feature) == "-"] == [
        *([] if page.has("key centering") else ["score centering"]),
        "bitwise equal engines",
    ]


def test_a_part_of_the_catalogue_without_a_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    without = [feature for feature in comparison_page.FACTS["feature"] if "VESPO" not in feature["name"]]
    monkeypatch.setitem(comparison_page.FACTS, "feature", without)
    assert comparison_page.list_unclaimed() == {"kind gamma"}
