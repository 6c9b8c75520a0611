"""Commands that each measure one cost, run at a small size, and what all benchmarks share; no time is asserted."""

from __future__ import annotations

import pytest

from scripts.benchmark import routing_replay, worker_stage
from scripts.harness import find_median_ratio, take_turns


def test_sides_take_turns_after_a_round_that_does_not_count() -> None:
    called: list[str] = []

    def side(name: str) -> int:
        called.append(name)
        return len(called)

    assert take_turns({"a": lambda: side("a"), "b": lambda: side("b")}, 2) == {"a": [4, 5], "b": [3, 6]}
    assert called == ["a", "b", "b", "a", "a", "b"]
    assert find_median_ratio([1.0, 6.0, 4.0], [2.0, 2.0, 2.0]) == 2.0


@pytest.mark.verl("==0.9.1")
def test_the_worker_stage_is_timed_with_centering() -> None:
    sizes = worker_stage.Sizes(rows=3, prompt=2, response=4, micro_batches=2, mini_batches=3)
    found = worker_stage.compare("tiny", sizes, 2, "cpu", centering=4, vocabulary=64)
    assert (found["centering"], found["vocabulary"], found["rows"]) == (4, 64, 3)
    assert {"uncentred_seconds", "uncentred_growth_bytes", "ours_growth_bytes"} < set(found)
    assert "4 of 64 tokens" in worker_stage.format_figures(found)


def test_a_small_model_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    routing_replay.main(["--hidden", "32", "--layers", "2", "--tokens", "64", "--pairs", "1"])
    assert "8 experts, 2 a token, 2 layers, hidden 32, 64 tokens" in capsys.readouterr().out


# What statistics and the recorder take of a real run's steps: the sums, and the notes of calls that they are of
