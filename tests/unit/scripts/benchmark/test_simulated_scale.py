"""Growth by size: every part runs at a small one, and the figures are those of the rows; no time is asserted."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from scripts.benchmark.simulated_parts import PARTS, draw_offsets, draw_tokens
from scripts.benchmark.simulated_scale import (
    QUICK,
    add_up_driver,
    fit_exponent,
    format_cells,
    list_sizes,
    main,
    summarise,
)

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")


def test_exponents_by_hand() -> None:
    assert fit_exponent([(8, 2.0), (16, 4.0), (32, 8.0)]) == pytest.approx(1.0)
    # log2 of 1, 1 and 8 over 0, 1, 2: a slope of 1.5.
    assert fit_exponent([(1, 1.0), (2, 1.0), (4, 8.0)]) == pytest.approx(1.5)
    assert math.isnan(fit_exponent([(8, 2.0)]))


def test_the_driver_does_each_part_at_its_largest_size() -> None:
    def row(part: str, size: int, seconds: float, *, of_driver: bool = True, grown: int = 1 << 30) -> dict[str, object]:
        taken = {"seconds": seconds, "system": 0.5, "bytes": grown}
        return {"part": part, "unit": "row", "size": size, "of_driver": of_driver, **taken}

    rows = [row("a", 10, 1.0), row("a", 100, 5.0), row("b", 8, 0.25), row("c", 9, 7.0, of_driver=False)]
    assert add_up_driver(rows) == 6.25  # 5 and 0.25, and half a second of the system's each
    grown = {4: 1 << 10, 8: 1 << 30, 16: 1 << 31}
    found = summarise([row("a", size, size / 4, grown=grown.get(size, 9)) for size in (1, 16, 2, 8, 4)])
    assert found["a"]["time"] == pytest.approx(1.0)
    assert found["a"]["memory"] == pytest.approx(1.0)  # of 8 and 16: a kibibyte is no growth that can be told
    flat_at_first = [row("a", size, max(size, 4)) for size in (1, 2, 4, 8, 16)]
    assert summarise(flat_at_first)["a"]["time"] == pytest.approx(1.0)
    assert format_cells(row("a", 2**20, 1.0)) == ["a", "2^20 rows", "1000.0", "954", "477", "1024.0", "1024"]


def test_sizes() -> None:
    assert list_sizes("token", 22, quick=False) == (2**18, 2**20, 2**22)
    assert list_sizes("rank", 22, quick=False)[-1] == 512
    assert list_sizes("row", 22, quick=False)[-1] == 100_000


def test_rows_that_are_drawn_have_the_size_asked_for() -> None:
    offsets = draw_offsets(10_000, 64)
    assert (int(offsets[0]), int(offsets[-1]), len(offsets)) == (0, 10_000, 157)
    assert int(offsets.diff().min()) >= 1
    packed, padded = (draw_tokens(2**14, nested=nested) for nested in (True, False))
    assert packed.mu.values().numel() == padded.mu.numel() == 2**14
    assert 0.25 < padded.mask.double().mean() < 0.75
    assert torch.equal(packed.mu.values(), padded.mu.flatten())


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


def test_sizes_beyond_the_memory_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--parts", "step stage, packed", "--memory", "0.001", "--largest", "18"]) == 0
    assert "step stage, packed: 2^18 tokens left out, about 0 GiB" in capsys.readouterr().err
