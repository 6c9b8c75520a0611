"""The committed results, and the statements of the pages and the figure about them."""

from __future__ import annotations

import pytest
from collapse import analyse, results

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "evidence" / "collapse.md"


def test_the_page_shows_the_committed_outcomes() -> None:
    page = PAGE.read_text()
    for table in analyse.build_tables(results.read(), results.read(results.IN_PROCESS)):
        assert "\n".join(table) in page
