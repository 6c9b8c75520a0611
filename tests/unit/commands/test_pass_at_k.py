"""The tool on dumps of both trainers: table, JSON, curve, and what it warns of."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from recipe.offpolicy.analysis.pass_at_k import build_json, build_table, draw_curves, estimate, read_dumps
from recipe.offpolicy.extensions.pass_at_k.estimates import Stopping
from recipe.offpolicy.extensions.validation_answers import DumpError, read_answers
from recipe.offpolicy.pass_at_k import main, parse_counts


def write(path: Path, rights: list[int], n: int = 8, *, step: int = 10, v1: bool = False, first: int = 0) -> Path:
    """A dump in which prompt i has ``rights[i]`` of ``n`` right."""
    lines = []
    for prompt, right in enumerate(rights, first):
        for sample in range(n):
            row: dict[str, Any] = {"input": f"q{prompt}", "output": "x", "gts": "y", "step": step}
            row["score"] = float(sample < right)
            lines.append(row | ({"uid": f"{path.stem}-{prompt}_{sample}_0"} if v1 else {}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("v1", [False, True])
def test_counts_by_prompt(tmp_path: Path, v1: bool) -> None:
    (found,) = read_dumps([write(tmp_path / "10.jsonl", [1, 0, 8], v1=v1)], correct_at_least=1.0)
    assert (found.step, found.n, found.c) == (10, [8, 8, 8], [1, 0, 8])
    assert (found.doubled, found.named) == (0, v1)


def test_rounds_of_one_step_are_pooled_and_steps_are_apart(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [1, 0, 8], v1=True)
    two = write(tmp_path / "b.jsonl", [0], v1=True, first=1)
    later = write(tmp_path / "c.jsonl", [3], step=20, v1=True)
    first, second = read_dumps([one, two, later], correct_at_least=1.0)
    assert (first.n, first.c, first.doubled) == ([8, 16, 8], [1, 0, 8], 0)
    assert (second.step, second.n, second.c) == (20, [8], [3])
    again = read_dumps([one, two, tmp_path / ".." / tmp_path.name / "a.jsonl"], correct_at_least=1.0)
    assert (again[0].n, again[0].c) == (first.n, first.c)


def test_outputs_of_one_session_count_once_and_doubles_are_seen(tmp_path: Path) -> None:
    rows = [
        {"input": "q", "gts": "y", "score": 1, "step": 1, "uid": uid} for uid in ("a_0_0", "a_0_1", "a_1_0", "b_0_0")
    ]
    path = tmp_path / "1.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    (found,) = read_dumps([path], correct_at_least=1.0)
    assert (found.n, found.c, found.doubled) == ([3], [3], 1)
    (note,) = estimate(found, [1], extrapolate=[], stopping=None, ranking=False).notes
    assert "contains 1 prompts more than once" in note


def test_prompts_that_dumps_do_not_name_may_be_doubled(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", [1, 0]), write(tmp_path / "b.jsonl", [0])]
    (found,) = read_dumps(paths, correct_at_least=1.0)
    notes = estimate(found, [1], extrapolate=[], stopping=None, ranking=False).notes
    assert "A prompt that the data set contains twice counts as one prompt." in notes[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: not JSON"),
        ('{"input": "q", "step": 1}', "line 1: no score"),
        ("[1]", "line 1: no input, score, step"),
        ('{"input": "q", "step": 1, "score": NaN}', "line 1: the score nan"),
        ('{"input": "q", "step": 1, "score": Infinity}', "line 1: the score inf is not a finite number"),
        ('{"input": "q", "step": null, "score": 1}', "line 1: the step None is not a whole number"),
        ('{"input": "q", "step": 1, "score": 1}\n\udcff', "line 2: not JSON"),
        ("", "no sample"),
    ],
)
def test_other_files_are_refused_with_the_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DumpError, match=said):
        read_dumps([path], correct_at_least=1.0)
    assert main([str(path)]) == 2
    assert said in capsys.readouterr().err


def test_separators_of_unicode_end_no_line(tmp_path: Path) -> None:
    """verl writes them as they are; str.splitlines would end a line there."""
    path = tmp_path / "x.jsonl"
    row = {"input": "q\u2028r", "output": "a\x85b\u2029", "gts": "1", "score": 1.0, "step": 1}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    (counts,) = read_dumps([path], correct_at_least=1.0)
    assert (counts.n, counts.c) == ([1], [1])
    assert [(each.prompt, each.output) for each in read_answers(path)] == [("q\u2028r", "a\x85b\u2029")]


def test_the_table_has_intervals_and_ranks_in_a_column_of_their_own(tmp_path: Path) -> None:
    (counts,) = read_dumps([write(tmp_path / "a.jsonl", [0, 1, 2, 6] * 10)], correct_at_least=1.0)
    found = estimate(counts, [1, 4, 64], extrapolate=[64], stopping=None, ranking=True)
    table = build_table(found)
    assert [column.name for column in table.columns][-1] == "Bernoulli (ranking only)"
    assert [(row[0], row[4]) for row in table.rows] == [(1, "unbiased"), (4, "unbiased"), (64, "fit")]
    k, value, low, high, _, shown = table.rows[1]
    assert (k, value) == (4, pytest.approx((0 + 0.5 + 1 - 15 / 70 + 1) / 4))
    assert low < value < high
    assert shown == "0.523"  # (0 + 1 - (7/8)^4 + 1 - (3/4)^4 + 1 - (1/4)^4) / 4
    assert "40 prompts, 320 samples, 25.0% unsolved" in table.title
    assert "k = 64: some prompts have fewer samples" in found.notes[0]
    assert build_json(found)["extrapolated"]["64"]["estimate"] > value
    assert draw_curves([found]).axes[0].get_xlabel() == "k"


def test_samples_that_differ_are_said_and_rounds_are_estimated_by_their_rule(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", [2, 0]), write(tmp_path / "b.jsonl", [1], first=1)]
    (counts,) = read_dumps(paths, correct_at_least=1.0)
    naive = estimate(counts, [8], extrapolate=[], stopping=None, ranking=False)
    assert any("pass --looks and --successes" in note for note in naive.notes)
    found = estimate(counts, [8], extrapolate=[], stopping=Stopping((8, 16), 1), ranking=False)
    assert found.summary.points[8][0] < naive.summary.points[8][0]
    assert not any("--looks" in note for note in found.notes)


def test_the_command_prints_a_table_or_json_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump, picture = write(tmp_path / "a.jsonl", [0, 1, 2, 6] * 5), tmp_path / "curve.png"
    assert main([str(dump), "--k", "1,8", "--extrapolate", "64", "--png", str(picture)]) == 0
    assert "Step 10: 20 prompts" in capsys.readouterr().out
    assert picture.stat().st_size > 1000
    assert main([str(dump), "--k", "1,8", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["pass_at_k"]["8"]["estimate"] == 0.75
    assert found["beta"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--looks", "8,16"], "--looks and --successes belong together"),
        (["--looks", "4,8", "--successes", "1", "--k", "4"], "would have ended at an earlier look"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = write(tmp_path / "a.jsonl", [8, 6])
    assert main([str(dump), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    assert main([str(tmp_path / "none.jsonl")]) == 2


@pytest.mark.parametrize("given", [["--correct-at-least", "nan"], ["--successes", "0"], ["--successes", "-1"]])
def test_numbers_that_mean_nothing_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["x.jsonl", *given])
    assert f"argument {given[0]}: '{given[1]}' is not a" in capsys.readouterr().err


def test_counts_are_parsed_in_order() -> None:
    assert parse_counts("64,1,8") == [1, 8, 64]
    for text in ("a", "0,1", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_counts(text)
