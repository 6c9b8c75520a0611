"""The limit of staleness as it adapts, and as a checkpoint brings it back."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from recipe.offpolicy.batch.declared_keys import read_shipped_defaults
from tests.support.bounded_run import Run

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")


def adapted(monkeypatch: pytest.MonkeyPatch, ess: float, waited: float, **keys: Any) -> Run:
    """A run that moves eta, whose trainer waits so long of each step's 10 seconds and reports this sample size."""
    run = Run(monkeypatch, adapt=read_shipped_defaults("staleness")["adapt"] | {"ess": 0.9, "every": 2} | keys, eta=0)

    def step(metrics: dict[str, float], timing: Any) -> None:
        run.train(1)
        run.trainer.global_steps -= 1
        run.limit.tally.waited = waited
        metrics["offpolicy/weight/ess"] = ess

    clock = iter(range(0, 10_000, 10))
    run.corrected._run_step = step
    run.limit.clock = lambda: next(clock)
    return run


def take(run: Run, steps: int) -> list[float]:
    """The eta of each step, as the logger gets it."""
    etas = []
    for _ in range(steps):
        metrics: dict[str, float] = {}
        run.trainer.step(metrics, {})
        etas.append(metrics["offpolicy/staleness/eta"])
        run.trainer.global_steps += 1
    return etas


def test_eta_moves_by_what_the_step_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    run = adapted(monkeypatch, ess=0.95, waited=4.0, ceiling=2)
    with caplog.at_level(logging.INFO):
        assert take(run, 8) == [0, 0, 1, 1, 2, 2, 2, 2]
    assert "offpolicy.staleness.eta: 0 -> 1 from the next step on: an ESS of 0.9500 in 2 step(s)" in caplog.text
    assert "the trainer waited 40.0%" in caplog.text
    assert max(run.ages()) == 2
    assert run.limit.tally.issued == 4
    idle = adapted(monkeypatch, ess=0.95, waited=0.4)
    assert take(idle, 8) == [0] * 8


def test_a_resumed_run_goes_on_with_its_eta(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    before = adapted(monkeypatch, ess=0.95, waited=4.0)
    take(before, 3)
    saved = json.loads(json.dumps(before.limit.rate_limit_state))
    assert (saved["eta"], saved["account"], saved["changes"]) == ("1", 16, [[0, "0"], [3, "1"]])
    more = take(before, 2)
    run = adapted(monkeypatch, ess=0.95, waited=4.0)
    with caplog.at_level(logging.WARNING):
        run.limit._resume(3, 4, saved)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (run.limit.rate_limit.eta, run.limit.rate_limit.room(4)) == (1, 4)
    assert [run.limit.age_limit.get_oldest(issued) for issued in (2, 3, 4)] == [0, 1, 1]
    run.limit.rate_limit.account -= 4  # those of before are not in this queue
    run.trainer.global_steps = 4
    assert take(run, 2) == more == [1, 2]


def test_a_resumed_run_with_other_keys_says_so_and_begins_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = adapted(monkeypatch, ess=0.95, waited=4.0)
    take(before, 3)
    run = adapted(monkeypatch, ess=0.95, waited=4.0, patience=5)
    run.limit._resume(3, 4, before.limit.rate_limit_state)
    assert "eta restarts at 0" in caplog.text
    assert "offpolicy.staleness.adapt.patience: 2 in the checkpoint, 5 now" in caplog.text
    assert "resuming with offpolicy.staleness.eta=0; the checkpoint was trained with 1" in caplog.text
    assert [run.limit.age_limit.get_oldest(issued) for issued in (2, 3, 4)] == [0, 1, 0]


# Resumed runs ---------------------------------------------------------------------------------------------------


def test_a_resumed_run_counts_what_came_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After step 3 of eta 2, 8 prompts wait; the step after it has room for 4, as without the break."""
    before = Run(monkeypatch, eta=2)
    before.train(3)
    saved = before.limit.rate_limit_state
    assert saved == {"eta": "2", "account": 20}
    run = Run(monkeypatch, eta=2)
    with caplog.at_level(logging.WARNING):
        run.limit._resume(3, 8, saved)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert run.limit.rate_limit.room(4) == 4
    run.limit._resume(3, 6, saved)
    assert "2 prompts that waited at the checkpoint were not restored" in caplog.text


@pytest.mark.parametrize(("step", "account", "room"), [(0, 0, 12), (3, 20, 4)])
def test_what_verl_has_loaded_is_counted(step: int, account: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.staleness import staleness_limit

    run = Run(monkeypatch, eta=2)
    run.trainer.global_steps, run.trainer._restored_tq_prompt_count = step, 8
    monkeypatch.setattr(run.corrected, "_check_resumed", lambda: None)
    run.corrected.verls._load_checkpoint = lambda: "what verl returns"
    monkeypatch.setattr(staleness_limit, "read_staleness", lambda config: {"eta": "2", "account": 20})
    assert run.trainer._load_checkpoint() == "what verl returns"
    assert run.limit.rate_limit.account == account
    assert run.limit.rate_limit.room(step + 1) == room
    assert run.limit.age_limit.get_oldest(step) == run.limit.age_limit.get_oldest(step + 1) == 2


# Updates ---------------------------------------------------------------------------------------------------------
