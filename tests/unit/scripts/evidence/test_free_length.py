"""The evidence on length: one step of each arm, and the table and verdict of what was run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas
import pytest
import torch

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "evidence"))
pytest.importorskip("verl")

from free_length import free_length
from free_length.free_length import (
    ARMS,
    VERL_BLOCK,
    VERL_LAST,
    Sampled,
    build_penalty,
    compute_ends,
    draw,
    estimate,
    format_arms,
    judge,
    print_table,
    read_runs,
    train,
    write_measured,
)

from scripts.quickstart.free_length import MOST_TOKENS
from scripts.quickstart.model import build_model, build_tokenizer

pytestmark = pytest.mark.verl(">=0.9")

ENTRY = {"question": "Spell backward: cat", "answer": "tac", "metadata": {"word": "cat"}}


def test_arms_are_all_kinds_in_both_places() -> None:
    assert len(ARMS) == len(set(ARMS)) == 7
    found = [(penalty.length.kind, penalty.length.place) for penalty in map(build_penalty, ARMS)]
    assert [kind if kind == "none" else f"{kind}/{place}" for kind, place in found] == list(ARMS)


def test_advantages_are_verls_without_a_penalty_and_others_with_one() -> None:
    mask = torch.arange(4) < torch.tensor([[2], [4]] * 8)
    found = Sampled([[1]] * 16, torch.zeros(16, 4, dtype=torch.int64), torch.zeros(16, 4), mask)
    scores = torch.tensor([1.0, 0, 1, 0, 0, 0, 0, 0] + [1.0] * 8)
    plain = estimate(found, scores, build_penalty("none"), 1)
    assert not plain[8:].any()
    after, before = (
        estimate(found, scores, build_penalty(f"group/{place}"), 1)[8:, 0] for place in ("after", "before")
    )
    assert after[0] == pytest.approx(0.05)
    assert before[0] == pytest.approx(0.935, abs=1e-3)  # sqrt(7 / 8), whatever the coefficient


def test_a_run_is_written_step_by_step(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("Spell backward:")
    model = build_model(tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    history = train("uniform/before", 0, tmp_path, [ENTRY] * 8, 1)
    assert [each["step"] for each in history] == [1]
    data = history[0]["data"]
    assert 1 <= data["response_length/mean"] <= MOST_TOKENS
    assert data["length/right/sequences"] + data["length/wrong/sequences"] == 64


def write_runs(folder: Path) -> None:
    lines = [
        {"step": s, "data": {"response_length/mean": 10.0 + s, "critic/score/mean": s / 100}} for s in range(1, 31)
    ]
    for name in ("none-0", "none-1", "group-before-0"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_raw_figures_are_means_of_five_steps_and_stay_through_a_file(tmp_path: Path) -> None:
    write_runs(tmp_path)
    line = {"step": 6, "data": {"response_length/mean": 4, "critic/score/mean": 1.0, "length/anchor/mean": 7.0}}
    (tmp_path / "anchor-after-3.jsonl").write_text(json.dumps({"step": 0, "data": {}}) + "\n" + json.dumps(line) + "\n")
    found = read_runs(tmp_path)
    blocks = {run: list(rows.itertuples(index=False, name=None)) for run, rows in found.groupby(["arm", "seed"])}
    assert set(blocks) == {("none", 0), ("none", 1), ("group/before", 0), ("anchor/after", 3)}
    assert blocks["anchor/after", 3] == [("anchor/after", 3, 6, 4.0, 1.0, 7.0)]
    assert [block[2] for block in blocks["none", 1]] == [5, 10, 15, 20, 25, 30]
    assert (blocks["none", 1][0][3], blocks["none", 1][-1][4]) == pytest.approx((13.0, 0.28))
    assert compute_ends(found).loc["none", 1].tolist() == pytest.approx([15.5, 0.055, 35.5, 0.255])
    write_measured(found, tmp_path / "measured.csv")
    pandas.testing.assert_frame_equal(pandas.read_csv(tmp_path / "measured.csv"), found)


def test_the_table_and_the_figure_are_of_all_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = pandas.read_csv(ROOT / "scripts" / "evidence" / "free_length" / "measured.csv")
    print_table(compute_ends(measured))
    text = capsys.readouterr().out
    assert "33.7 to 38.1" in text
    assert "group/before" in text
    draw(measured, tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes()[:4] == b"\x89PNG"


def test_expectations_are_judged_by_the_ends_of_paired_seeds() -> None:
    """none: 30 tokens, 0.6 then 0.9 right. 8 tokens are below a third, 11 are not."""
    rows = {}
    for seed in range(8):
        rows["none", seed] = (25.0, 0.6, 30.0, 0.9)
        rows["uniform/before", seed] = (25.0, 0.6, 8.0 if seed < 6 else 11.0, 0.3)
        rows["group/before", seed] = (25.0, 0.6, 8.0, 0.3 if seed < 5 else 0.7)
        rows["anchor/before", seed] = (25.0, 0.6, 20.0, 0.86)
        rows["anchor/after", seed] = (25.0, 0.6, 20.0, 0.84)
    names = [f"{name}_{end}" for end in ("first", "last") for name in ("tokens", "right")]
    runs = pandas.DataFrame(rows, index=names).T.rename_axis(["arm", "seed"])
    assert [came_true for _, came_true, _ in judge(runs)] == [True, False, True, False]
    assert judge(runs)[2][2] == "-10.0 tokens, -0.040 right"


def test_whole_runs_on_verl_are_collected_in_blocks_of_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_runs(tmp_path)
    monkeypatch.setattr("sys.argv", ["free_length.py", "collect", str(tmp_path), "--out", str(tmp_path / "verl.csv")])
    free_length.main()
    assert "group/before" in capsys.readouterr().out
    measured = pandas.read_csv(tmp_path / "verl.csv")
    assert measured.query("arm == 'none' and seed == 1")["step"].tolist() == [4, 8, 12, 16, 20, 24, 28, 30]
    assert compute_ends(measured, VERL_LAST).loc["none", 1].tolist() == pytest.approx([12.5, 0.025, 39.5, 0.295])


def name(arm: str) -> str:
    kind, _, place = arm.partition("/")
    return f"`{kind}`, {place}" if place else kind


def test_the_documentation_shows_the_figures_that_were_measured_on_verl() -> None:
    measured = pandas.read_csv(ROOT / "scripts" / "evidence" / "free_length" / "measured_verl.csv")
    shown, ends = (ROOT / "docs" / "evidence" / "length.md").read_text(), compute_ends(measured, VERL_LAST)
    assert set(ends.index) == {(arm, seed) for arm in ARMS for seed in (1, 2)}
    assert set(measured.groupby(["arm", "seed"]).size() * VERL_BLOCK) == {16}
    columns = {"tokens_first": 1, "tokens_last": 1, "right_first": 3, "right_last": 3}
    for arm in ARMS:
        found = [[f"{value:.{digits}f}" for value in ends.loc[arm][column]] for column, digits in columns.items()]
        assert f"| {name(arm)} | {' | '.join(map(' and '.join, found))} |" in shown


def test_the_documentation_shows_the_figures_that_were_measured() -> None:
    measured = pandas.read_csv(ROOT / "scripts" / "evidence" / "free_length" / "measured.csv")
    shown = (ROOT / "docs" / "evidence" / "length.md").read_text()
    for arm, (seeds, *cells) in format_arms(compute_ends(measured)).items():
        assert seeds == "8"
        assert f"| {name(arm)} | {' | '.join(cells)} |" in shown
