"""Reward by length and length by correctness: by hand, and from dumps, metrics and recordings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.analysis import AnalysisError
from recipe.offpolicy.analysis.lengths import (
    Answers,
    bin_rewards,
    find_best,
    find_edges,
    measure_rows,
    read_curves,
)
from recipe.offpolicy.lengths import main
from scripts.quickstart.model import build_tokenizer
from tests.support.recordings import drawn_rows


def make_answers(label: str, lengths: list[int], rewards: list[float], prompts: list[str]) -> Answers:
    return Answers(label, np.array(prompts, dtype=object), np.array(lengths, float), np.array(rewards, float))


def test_a_bin_by_hand() -> None:
    """40 short answers of two prompts, 30 correct for one prompt and none for the other; 40 long answers, all
    correct.
    """
    short, long = [10] * 40, [90] * 40
    rewards = [1.0] * 30 + [0.0] * 10 + [1.0] * 40
    of = make_answers("x", short + long, rewards, ["p"] * 30 + ["q"] * 10 + ["p", "q"] * 20)
    edges = find_edges([of])
    assert edges.tolist() == [10.0, 50.0, 90.0] or (edges[0], edges[-1]) == (10.0, 90.0)
    curve = bin_rewards(of, edges)
    assert (curve.tokens[0], curve.reward[0], curve.share[0]) == (10.0, 0.75, 0.5)
    assert (curve.tokens[-1], curve.reward[-1], curve.share[-1]) == (90.0, 1.0, 0.5)
    # By prompt the deviations from 3/4 add up to 30/4 and -30/4.
    assert curve.high[0] - curve.reward[0] == pytest.approx(1.96 * math.sqrt(2 * 7.5**2) / 40)
    assert find_best(curve) == 90.0


def write_dump(path: Path, step: int, right: dict[str, tuple[int, int]], n: int = 40) -> Path:
    """Write a dump. ``right``: prompt -> number of correct answers of n, and letters of each answer."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "".join(
            json.dumps({"input": prompt, "output": "x" * letters, "score": float(at < count), "step": step}) + "\n"
            for prompt, (count, letters) in right.items()
            for at in range(n)
        )
    )
    return path


def test_classes_are_those_of_the_first_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_tokenizer("Spell it.").save_pretrained(tmp_path / "tokenizer")
    early = write_dump(tmp_path / "a" / "100.jsonl", 100, {"p": (39, 5), "q": (1, 10), "r": (20, 7)})
    late = write_dump(tmp_path / "a" / "1000.jsonl", 1000, {"p": (30, 6), "q": (8, 13), "r": (40, 9)})
    given = [str(early), str(late), "--tokenizer", str(tmp_path / "tokenizer"), "--samples", "40"]
    assert main([*given, "--json", "--png", str(tmp_path / "x.png")]) == 0
    rows = {(each["checkpoint"], each["class"]): each for each in json.loads(capsys.readouterr().out)}
    assert {key: (each["prompts"], each["pass_rate"], each["tokens"]) for key, each in rows.items()} == {
        ("step 100", "easy"): (1, 0.975, 5.0),
        ("step 1000", "easy"): (1, 0.75, 6.0),
        ("step 100", "hard"): (1, 0.025, 10.0),
        ("step 1000", "hard"): (1, 0.2, 13.0),
    }
    assert (tmp_path / "x.png").stat().st_size > 1000
    other = write_dump(tmp_path / "b" / "1000.jsonl", 1000, {"p": (40, 1), "q": (0, 2)})
    assert main([str(early), str(other), *given[2:]]) == 0
    assert "b, step 1000" in " ".join(capsys.readouterr().out.split())


REWARDS = np.array([1, 0, 1, 1, 0, 0, 0, 0], np.float32)
LENGTHS = [4, 8, 6, 2, 9, 9, 9, 5]


def metrics(path: Path, steps: int = 3, **more: float | None) -> Path:
    lines = [{"step": 0, "data": {"val-core/x": 1.0}}]
    for step in range(1, steps + 1):
        data: dict[str, Any] = {
            "response_length/mean": 10.0 + step,
            "critic/score/mean": 0.5,
            "length/right/mean": 5.0 * step,
        } | more
        data |= {"length/easy/mean": None, "note": "text"}  # as verl's logger writes NaN
        lines.append({"step": step, "data": data})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_recorded_step_by_hand() -> None:
    """Two prompts with four rows each: 3 of 4 correct, and none."""
    rows = drawn_rows(LENGTHS, reward=REWARDS)
    found = measure_rows(rows, 1.0)
    assert (found.step, found.reward) == (1, 0.375)
    assert found.lengths["all"] == 6.5
    assert (found.lengths["right"], found.lengths["wrong"]) == (4.0, 8.0)
    assert (math.isnan(found.lengths["easy"]), found.lengths["hard"]) == (True, 8.0)


@pytest.mark.parametrize(
    ("text", "said"), [("{}", "line 1: this line was not written"), ("", "no step records response_")]
)
def test_other_files_are_refused(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(AnalysisError, match=said):
        read_curves(path, correct_at_least=1.0)
    assert main([str(path)]) == 2
    assert said in capsys.readouterr().err
