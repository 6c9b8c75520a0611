"""Links in the pages lead to files of the repository, and generated pages are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import keys_page
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
