"""Links of the pages lead to files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "recipe" / "offpolicy" / "README.md"])
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]
