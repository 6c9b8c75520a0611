"""Facts of docs/comparison.md about packages that can be installed."""

from __future__ import annotations

import pytest

from tests.support.comparison_page import FACTS
from tests.support.conformance import REQUIREMENTS, install

pytestmark = pytest.mark.extended


@pytest.mark.parametrize(
    ("column", "peer"),
    [("AR", "areal"), ("OR", "openrlhf"), ("Sk", "skyrl"), ("Sw", "ms_swift"), ("TR", "trl")],
)
def test_release_and_files(column: str, peer: str) -> None:
    """miles is left out: its package is of another release than the one that was read."""
    framework, folder = FACTS["framework"][column], install(peer)
    assert framework["release"] == (REQUIREMENTS / f"{peer}.txt").read_text().split()[0].partition("==")[2]
    assert [path for path in framework["files"].values() if "/" in path and not (folder / path).exists()] == []
