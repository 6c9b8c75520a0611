"""Runs in one process, with an exactly late sampler."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch
from collapse import arms, results


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, which sets this process's environment for verl on a CPU."""
    monkeypatch.setattr("os.environ", dict(os.environ))
    return importlib.import_module("collapse.in_process")


def test_as_many_negative_rows_are_dropped_as_opsm_drops(in_process: ModuleType) -> None:
    """Of six rows four are negative; OPSM drops the first two, and a token of the last alone."""
    mask = torch.tensor([[1, 1, 0]] * 6).bool()
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0])[:, None].expand(6, 3)
    factor = torch.ones(6, 3)
    factor[:2, :2] = 0.0
    factor[5, 0] = 0.0
    counts = torch.zeros(6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        found = in_process.shuffle_rejected(factor, advantages, mask, generator)
        dropped = (found == 0).all(-1)
        assert int(dropped.sum()) == 2
        assert set(found[~dropped].flatten().tolist()) == {1.0}
        counts += dropped
    assert counts[4:].tolist() == [0, 0]
    assert counts[:4].min() > 70  # of 100 expected


def test_in_process_runs_differ_in_arm_eta_rate_and_seed(
    in_process: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(results, "IN_PROCESS", tmp_path / "none.parquet")
    runs = list(arms.list_late_runs())
    assert len({run.name for run in runs}) == len(runs) == 10 * (2 * 5 * 6 + 4)
    assert {run.seed for run in runs} == set(range(2, 12))
    assert in_process.main(["opsm", "--list"]) == 0
    assert "110 of 110 left" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(SystemExit, match="opsn: unknown"):
        in_process.main(["opsn"])


def test_log_mu_is_that_of_the_sampled_tokens(in_process: ModuleType) -> None:
    """Prompts of different lengths, padded on the left; an answer ends with its end of sequence."""
    from scripts.quickstart.model import build_model, build_tokenizer

    tokenizer = build_tokenizer("Spell this word backward: ")
    model = build_model(tokenizer, spread=0.2).eval()
    torch.manual_seed(0)
    prompts = [[10, 11, 12], [13, 14, 15, 16, 17]] * 8
    answers, log_mu, _ = in_process.sample(model, tokenizer, prompts)
    assert {len(answer) for answer in answers} <= set(range(1, arms.MAX_TOKENS + 1))
    for prompt, answer, found in zip(prompts, answers, log_mu, strict=True):
        assert tokenizer.eos_token_id not in answer[:-1].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.tolist()]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
