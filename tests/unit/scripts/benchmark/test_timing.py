"""What the benchmarks share: turns, processes of their own, and counts."""

from __future__ import annotations

import os

import pytest

from scripts.benchmark.timing import add_counts, build_parser, find_median_ratio, run_in_fresh_process, take_turns


def test_sides_take_turns_after_a_round_that_does_not_count() -> None:
    called: list[str] = []

    def side(name: str) -> int:
        called.append(name)
        return len(called)

    assert take_turns({"a": lambda: side("a"), "b": lambda: side("b")}, 2) == {"a": [4, 5], "b": [3, 6]}
    assert called == ["a", "b", "b", "a", "a", "b"]
    assert find_median_ratio([1.0, 6.0, 4.0], [2.0, 2.0, 2.0]) == 2.0


def test_a_process_that_ends_without_an_answer_is_told() -> None:
    assert run_in_fresh_process(os.getpid) != os.getpid()
    with pytest.raises(RuntimeError, match="ended with no answer"):
        run_in_fresh_process(os._exit, 1)


def test_a_count_is_one_or_more(capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser("")
    add_counts(parser, top_k=2)
    assert parser.parse_args(["--top-k", "3"]).top_k == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["--top-k", "0"])
    assert "--top-k: 0: give a number of 1 or more" in capsys.readouterr().err
