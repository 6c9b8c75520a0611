"""The evidence on length: one step of each arm, and the table and verdict of what was run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "evidence"))
pytest.importorskip("verl")

from free_length import free_length, free_length_training
from free_length.free_length_training import ARMS, build_penalty, estimate, train

from scripts.quickstart.free_length import MOST_TOKENS
from scripts.quickstart.free_length_warm_start import warm_start_at_length
from scripts.quickstart.model import build_model, build_tokenizer

pytestmark = pytest.mark.verl(">=0.9")

ENTRY = {"question": "Spell backward: cat", "answer": "tac", "metadata": {"word": "cat"}}


def test_arms_are_all_kinds_in_both_places() -> None:
    assert len(ARMS) == len(set(ARMS)) == 7
    found = [(penalty.length.kind, penalty.length.place) for penalty in map(build_penalty, ARMS)]
    assert [kind if kind == "none" else f"{kind}/{place}" for kind, place in found] == list(ARMS)


def test_advantages_are_verls_without_a_penalty_and_others_with_one() -> None:
    mask = torch.arange(4) < torch.tensor([[2], [4]] * 8)
    found = free_length_training.Sampled([[1]] * 16, torch.zeros(16, 4, dtype=torch.int64), torch.zeros(16, 4), mask)
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
    warm_start_at_length(model, tokenizer, [ENTRY] * 8, lambda *_: None, steps=2)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    history = train("uniform/before", 0, tmp_path, [ENTRY] * 8, 1)
    assert [each["step"] for each in history] == [1]
    data = history[0]["data"]
    assert 1 <= data["response_length/mean"] <= MOST_TOKENS
    assert data["length/right/sequences"] + data["length/wrong/sequences"] == 64


def test_the_table_is_of_first_and_last_steps(tmp_path: Path) -> None:
    lines = [
        {"step": s, "data": {"response_length/mean": 10.0 + s, "critic/score/mean": s / 100}} for s in range(1, 31)
    ]
    for name in ("none-0", "none-1", "group-before-0"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert free_length.read_ends(tmp_path / "none-0.jsonl") == pytest.approx((15.5, 35.5, 0.055, 0.255))
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(free_length.build_table(free_length.read_runs(tmp_path)))
    text = console.export_text()
    assert "35.5 to 35.5" in text
    assert "group/before" in text
    assert "anchor/after" not in text


def test_expectations_are_judged_by_the_ends_of_paired_seeds() -> None:
    """none: 30 tokens, 0.6 then 0.9 right. 8 tokens are below a third, 11 are not."""
    runs: dict[str, dict[int, free_length.Ends]] = {arm: {} for arm in ARMS}
    runs["none"] = dict.fromkeys(range(8), (25.0, 30.0, 0.6, 0.9))
    runs["uniform/before"] = {seed: (25.0, 8.0 if seed < 6 else 11.0, 0.6, 0.3) for seed in range(8)}
    runs["group/before"] = {seed: (25.0, 8.0, 0.6, 0.3 if seed < 5 else 0.7) for seed in range(8)}
    runs["anchor/before"] = dict.fromkeys(range(8), (25.0, 20.0, 0.6, 0.86))
    runs["anchor/after"] = dict.fromkeys(range(8), (25.0, 20.0, 0.6, 0.84))
    assert [came_true for _, came_true, _ in free_length.judge(runs)] == [True, False, True, False]
    assert free_length.judge(runs)[2][2] == "-10.0 tokens, -0.040 right"
