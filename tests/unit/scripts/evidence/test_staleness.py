"""The evidence on staleness: how old its samples are, that arms differ where they should, and that claims can fail."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "evidence"))
pytest.importorskip("verl")

from seeds import ClaimError
from staleness import harness
from staleness.harness import (
    ARMS,
    ETAS,
    LENGTH,
    PROMPTS,
    RATES,
    Ratio,
    Run,
    Scores,
    ToyPolicy,
    check_claims,
    compute_ratio,
    compute_rewards,
    describe_one_step_behind,
    read_arm,
    train,
)

pytestmark = pytest.mark.verl(">=0.9")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_an_answer_is_right_by_place() -> None:
    """To prompt 2 the answer is 2, 5, 0, 3, 6, 1, 4, 7; half of it right is a reward of 1/2."""
    right = [2, 5, 0, 3, 6, 1, 4, 7]
    answers = torch.tensor([right, [*right[:4], 0, 0, 0, 0]])
    assert compute_rewards(torch.tensor([2, 2]), answers).tolist() == [1.0, 0.5]


def test_what_is_sampled_has_the_log_probs_of_the_policy() -> None:
    torch.manual_seed(0)
    policy, prompts = ToyPolicy(), torch.arange(PROMPTS)
    tokens, log_mu = policy.sample(prompts)
    assert tokens.shape == log_mu.shape == (PROMPTS, LENGTH)
    torch.testing.assert_close(policy(prompts, tokens), log_mu)


@pytest.mark.parametrize(("eta", "ages"), [(0, [0, 0, 0, 0]), (2, [0, 1, 2, 2]), (math.inf, [0, 1, 2, 3])])
def test_samples_are_eta_steps_old(eta: float, ages: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first weights sample what the queue begins with; without a bound they sample all of it."""
    updates, seen = 0, []
    sample = harness._sample
    first: list[Any] = []

    def noted(policy: ToyPolicy, each: int) -> Any:
        first.append(policy)
        # A sampler that is not trained stays at its first weights.
        made_by = 0 if math.isinf(eta) else updates
        return made_by, sample(policy, each)

    def update(policy: ToyPolicy, optimizer: Any, batch: Any, spec: Any) -> None:
        nonlocal updates
        made_by, _ = batch
        seen.append(updates - made_by)
        updates += 1
        assert (first[0] is policy) is math.isfinite(eta)

    class Score:
        rewards = torch.ones(1)

    monkeypatch.setattr(harness, "_sample", lambda policy, each: Score if each == 16 else noted(policy, each))
    monkeypatch.setattr(harness, "_update", update)
    train(Run("bypass", eta, 1e-2, 0), steps=4)
    assert seen == ages


@pytest.mark.slow
def test_arms_are_one_where_nothing_is_stale_and_differ_where_it_is() -> None:
    fresh = {train(Run(arm, 0, 1e-2, 0), steps=3) for arm in ARMS}
    assert len(fresh) == 1
    stale = {train(Run(arm, 2, 1e-1, 0), steps=6) for arm in ARMS}
    assert len(stale) == len(ARMS)
    assert read_arm("decoupled_ppo").weight is not None


def test_every_setting_is_run_once() -> None:
    runs = list(harness.list_runs(seeds=3))
    assert len(runs) == len(set(runs)) == 3 * len(RATES) * (1 + len(ARMS) * (len(ETAS) - 1))


def made(bypass: float, decoupled: float, spread: float = 0.0) -> Scores:
    by_arm = {"bypass": bypass, "resampling": 0.5, "decoupled_ppo": decoupled}
    return {
        (arm, eta, rate): [(0.8 if eta == 0 else by_arm[arm]) + spread * place for place in (-1, 0, 1)]
        for arm in ARMS
        for eta in ETAS
        for rate in RATES
    }


def test_a_ratio_of_means_with_its_interval() -> None:
    assert compute_ratio([0.4, 0.4], [0.8, 0.8]) == Ratio(0.5, 0.5, 0.5)
    wide = compute_ratio([0.2, 0.4, 0.6], [0.8, 0.8, 0.8])
    assert wide.value == pytest.approx(0.5)
    assert wide.low < 0.4 < 0.6 < wide.high


def test_claims_hold_over_their_whole_intervals() -> None:
    assert len(check_claims(made(0.2, 0.7), RATES)) == 2 * len(RATES)
    for scores in (made(0.5, 0.7), made(0.2, 0.5), made(0.38, 0.7, spread=0.1), made(0.2, 0.58, spread=0.1)):
        with pytest.raises(ClaimError, match="eta 8 reaches"):
            check_claims(scores, RATES)


def test_what_does_not_reproduce_is_said() -> None:
    assert all("does not reproduce" in each for each in describe_one_step_behind(made(0.9, 0.9), RATES))
    assert all('1 degraded" reproduces' in each for each in describe_one_step_behind(made(0.6, 0.9), RATES))


@pytest.mark.slow
def test_a_claim_that_does_not_hold_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for scores, status in ((made(0.2, 0.7), 0), (made(0.6, 0.7), 1)):
        monkeypatch.setattr(harness, "measure", lambda *given, found=scores: found)
        assert harness.main(["--out", str(tmp_path / "a.png")]) == status
    assert "DOES NOT HOLD" in capsys.readouterr().out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_scores_are_printed_with_their_share_of_synchronous_training() -> None:
    console = Console(record=True, width=160)
    harness.report(made(0.2, 0.6), console)
    assert "0.25 [0.25, 0.25]" in console.export_text()
