"""The committed results, and what the pages and the figure say of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas
import pytest
from collapse import analyse, arms, results
from seeds import bootstrap, sign_flip

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "evidence" / "collapse.md"


def test_the_page_shows_the_committed_outcomes() -> None:
    page = PAGE.read_text()
    for table in analyse.build_tables(results.read(), results.read(results.IN_PROCESS)):
        assert "\n".join(table) in page


def pair(names: str, etas: Sequence[int], rate: str) -> list[tuple[str, str]]:
    """Runs of two arms at each eta."""
    named = [name.split(":") for name in names.split()]
    return [(f"{one}-{eta}-{rate}", f"{other}-{eta}-{rate}") for one, other in named for eta in etas]


PAIRS = {
    results.DATA: [
        *(("late_opsm", "late"), ("late_opsm", "in_step"), ("late_decoupled", "late"), ("late_both", "late_opsm"))
    ],
    results.IN_PROCESS: [
        *pair("opsm:none", arms.ETAS, "0.001"),
        *pair("opsm:random both:opsm decoupled:none", (1, 2, 4, 8), "0.001"),
        *(*pair("bypass:none", (1, 2, 4), "0.001"), *pair("random:none", (8,), "0.001")),
        *pair("decoupled:none opsm:none both:none", (0,), "0.001-rounded"),
        *pair("opsm:none", arms.ETAS, "0.0003"),
        *pair("random:none opsm:random", (1, 2, 4, 8), "0.0003"),
        *(*pair("decoupled:none bypass:none", (4, 8), "0.0003"), *pair("both:opsm", (2, 8), "0.0003")),
        *((f"none-{eta}-0.001", "none-0-0.001") for eta in (1, 2)),
        *((f"none-{eta}-0.0003", "none-0-0.0003") for eta in (1, 2, 4, 8)),
        *((f"opsm-8-{rate}", f"opsm-0-{rate}") for rate in ("0.001", "0.0003")),
        ("none-0-0.001-rounded", "none-0-0.001"),
    ],
    results.OTHER_START: pair("opsm:random opsm:none random:none decoupled:none", (8,), "0.001"),
}


def format_difference(one: pandas.Series, other: pandas.Series) -> str:
    """The mean difference of outcomes paired by seed, its interval, and p of the sign-flip test."""
    apart = (one - other).dropna()
    low, high = bootstrap(apart)
    return f"{apart.mean():+.3f} [{low:+.3f}, {high:+.3f}], p = {sign_flip(apart):.2g}"


@pytest.mark.parametrize(
    ("path", "one", "other"), [(path, *names) for path, pairs in PAIRS.items() for names in pairs], ids=str
)
def test_the_page_shows_committed_differences(path: Path, one: str, other: str) -> None:
    """A mean difference paired by seed, its interval and its p value, as they are computed from the results."""
    table = results.read(path)
    ends = [analyse.outcomes(table, setting)["outcome"] for setting in (one, other)]
    assert format_difference(*ends) in " ".join(PAGE.read_text().split())


def test_a_difference_is_paired_by_seed() -> None:
    one, other = pandas.Series({2: 0.5, 3: 0.7, 4: 0.9}), pandas.Series({3: 0.4, 2: 0.2})
    assert format_difference(one, other) == "+0.300 [+0.300, +0.300], p = 0.5"
