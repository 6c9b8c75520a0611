"""Growth by size: every part runs at a small one, and the figures are those of the rows; no time is asserted."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from scripts.benchmark.simulated_parts import PARTS
from scripts.benchmark.simulated_scale import (
    QUICK,
    fit_exponent,
    main,
)

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")


def test_exponents_by_hand() -> None:
    assert fit_exponent([(8, 2.0), (16, 4.0), (32, 8.0)]) == pytest.approx(1.0)
    # log2 of 1, 1 and 8 over 0, 1, 2: a slope of 1.5.
    assert fit_exponent([(1, 1.0), (2, 1.0), (4, 8.0)]) == pytest.approx(1.5)
    assert math.isnan(fit_exponent([(8, 2.0)]))


@pytest.mark.slow
@pytest.mark.extended
def test_every_part_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--json", str(tmp_path / "scale.json")]) == 0
    rows = json.loads((tmp_path / "scale.json").read_text())["rows"]
    assert [(row["part"], row["size"]) for row in rows] == [
        (name, size) for name, part in PARTS.items() for size in QUICK[part.unit]
    ]
    assert all(row["seconds"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert "driver: " in printed
    # Below the first header: a line for each size, and a header with a line for each part.
    assert printed.count("\n| ") == len(rows) + 1 + len(PARTS)
