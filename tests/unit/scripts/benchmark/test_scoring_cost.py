"""The benchmark of scoring measures both ways at a small size; no time is asserted."""

from __future__ import annotations

import pytest

from scripts.benchmark.scoring_cost import main, measure

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("vllm")


def test_both_ways_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(measure(40, 2)) == {"flat", "by position"}
    assert main(["--positions", "40", "--repeats", "1"]) == 0
    assert capsys.readouterr().out.count("us a position") == 2


def test_sizes_that_measure_nothing_are_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--positions", "4"])
