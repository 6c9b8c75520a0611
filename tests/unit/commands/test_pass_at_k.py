"""pass@k of dumps: estimates, the ranking of checkpoints with its intervals, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.analysis import AnalysisError
from recipe.offpolicy.analysis.pass_at_k import (
    Counts,
    rank_checkpoints,
    read_dumps,
)
from recipe.offpolicy.extensions.validation_answers import DumpError
from recipe.offpolicy.pass_at_k import main


def counts(step: int, n: list[int], c: list[int], *, first: int = 0) -> Counts:
    return Counts(step, n, c, [(f"q{at}", "") for at in range(first, first + len(n))])


def test_two_checkpoints_by_hand() -> None:
    """pass@2 of 4 samples: 0 for 0 correct, 1/2 for 1, 5/6 for 2, and 1 for 4."""
    one = counts(1, [4] * 12, [0, 1, 2, 4] * 3)
    other = counts(2, [4] * 12, [1, 1, 2, 4] * 3)
    found = rank_checkpoints([one, other], 2)
    assert [each.name for each in found.places] == ["step 2", "step 1"]
    assert found.places[0].value[0] == pytest.approx((1 / 2 + 1 / 2 + 5 / 6 + 1) / 4)
    assert found.places[1].behind[0] == pytest.approx(-1 / 8)
    # One pair, whose difference is 1/2 in 3 of 12 prompts: standard error sqrt(1/16 - 1/64) / sqrt(12).
    low, high = found.places[1].behind[1:]
    assert (high - low) / 2 == pytest.approx(found.width * (3 / 64) ** 0.5 / 12**0.5, rel=0.05)
    assert (found.by, found.pairs, found.width) == ("unbiased", 1, pytest.approx(1.96, abs=0.15))


def sample(rates: Tensor, n: int, generator: torch.Generator) -> list[int]:
    return (torch.rand(len(rates), n, generator=generator) < rates[:, None]).sum(-1).tolist()


def test_the_intervals_allow_for_all_pairs_and_the_choice_of_the_first() -> None:
    """With six equal checkpoints, about 5 % of the draws call one worse; with 1.96 standard errors, a third would."""
    generator = torch.Generator().manual_seed(0)
    sets, worse, naive = 120, 0, 0
    for _ in range(sets):
        rates = torch.rand(60, generator=generator) * 0.5
        found = rank_checkpoints([counts(at, [8] * 60, sample(rates, 8, generator)) for at in range(6)], 4, draws=400)
        last = found.places[-1].behind
        worse += not all(each.may_be_best for each in found.places)
        naive += last[0] + (last[2] - last[0]) * 1.96 / found.width < 0
    assert (found.pairs, worse / sets <= 0.1, naive / sets > 0.2) == (15, True, True)


def test_beyond_equal_samples_the_bernoulli_formula_ranks_and_unequal_ones_are_fitted() -> None:
    one, other = ([3, 1, 0, 0] * 5, [2, 1, 1, 0] * 5)
    found = rank_checkpoints([counts(1, [8] * 20, one), counts(2, [8] * 20, other)], 64)
    assert (found.by, found.places[0].name) == ("Bernoulli", "step 2")
    assert "does not estimate pass@64" in found.notes[0]
    unequal = rank_checkpoints([counts(1, [8] * 20, [5, 1, 0, 0] * 5), counts(2, [16] * 20, [9, 1, 1, 0] * 5)], 64)
    assert unequal.by == "fit"
    assert "8 to 16 samples" in unequal.notes[0]


def test_what_cannot_be_compared_is_refused_and_few_prompts_separate_nothing() -> None:
    one = counts(1, [4] * 3, [4] * 3)
    with pytest.raises(AnalysisError, match="no prompt in common"):
        rank_checkpoints([one, counts(2, [4], [1], first=9)], 1)
    found = rank_checkpoints([one, counts(2, [4] * 4, [0] * 4)], 1)
    assert [each.may_be_best for each in found.places] == [True, True]
    assert found.notes[:-1] == (
        "1 prompts are excluded, because some checkpoints did not answer them.",
        "3 prompts are too few to separate checkpoints; at least 10 are needed.",
    )


def test_the_command_ranks_runs_whose_steps_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for run, right in (("good", 3), ("bad", 1)):
        for folder, first in ((run, 0), (f"{run}/round_2", 4)):
            (tmp_path / folder).mkdir()
            lines = [
                {"input": f"q{at}", "gts": "", "score": float(at % 4 < right), "step": 7, "uid": f"{at}_{first + n}_0"}
                for at in range(12)
                for n in range(4)
            ]
            paths.append(tmp_path / folder / "7.jsonl")
            paths[-1].write_text("\n".join(map(json.dumps, lines)))
    assert main([*map(str, paths), "--k", "8", "--rank", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["samples"], each["ranking"]["place"]) for each in found] == [(96, 2), (96, 1)]
    assert found[0]["ranking"]["behind_first"]["estimate"] == -0.5


def write(path: Path, rights: list[int], n: int = 8, *, step: int = 10, v1: bool = False, first: int = 0) -> Path:
    """Write a dump in which prompt i has ``rights[i]`` correct answers of ``n``."""
    lines = []
    for prompt, right in enumerate(rights, first):
        for sample in range(n):
            row: dict[str, Any] = {"input": f"q{prompt}", "output": "x", "gts": "y", "step": step}
            row["score"] = float(sample < right)
            lines.append(row | ({"uid": f"{path.stem}-{prompt}_{sample}_0"} if v1 else {}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rounds_of_one_step_are_pooled_and_steps_are_apart(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [1, 0, 8], v1=True)
    two = write(tmp_path / "b.jsonl", [0], v1=True, first=1)
    later = write(tmp_path / "c.jsonl", [3], step=20, v1=True)
    first, second = read_dumps([one, two, later], correct_at_least=1.0)
    assert (first.n, first.c, first.doubled) == ([8, 16, 8], [1, 0, 8], 0)
    assert (second.step, second.n, second.c) == (20, [8], [3])
    again = read_dumps([one, two, tmp_path / ".." / tmp_path.name / "a.jsonl"], correct_at_least=1.0)
    assert (again[0].n, again[0].c) == (first.n, first.c)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: not JSON"),
        ('{"input": "q", "step": 1, "score": Infinity}', "line 1: expected input, a finite score"),
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
