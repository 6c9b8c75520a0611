"""Prompts issued under a limit of staleness, by verl's own code on a dictionary for a queue."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.bounded_run import LONG, Run
from tests.support.examples import at_most

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")

STEPS = 14


def tenth(number: int, times: int) -> int:
    """One prompt of ten takes 12 steps."""
    return 12 if number % 10 == 3 else 0


def rarely(number: int, times: int = 0) -> int:
    """One prompt of twenty takes 6 steps: few enough that the others do not wait for room."""
    return 6 if number % 20 == 3 else 0


@pytest.mark.parametrize("eta", [0, 0.5, 2])
@pytest.mark.parametrize("delay", [lambda number, times: 0, tenth], ids=["even", "stragglers"])
def test_a_trainer_that_waits_reaches_eta_and_loses_nothing(
    eta: float, delay: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(monkeypatch, eta=eta, delay=delay)
    run.train(STEPS)
    assert max(run.ages()) == math.ceil(eta)
    assert len(run.trained) == 4 * STEPS
    assert set(Counter(uid for _, uid, _ in run.trained).values()) == {1}
    # Nothing is passed over for good: what is not trained was issued last.
    oldest = 4 * STEPS - int(eta * 4) - 4
    assert {f"u{number}" for number in range(max(oldest, 0))} <= {uid for _, uid, _ in run.trained}
    assert run.limit.rate_limit.account == 4 * STEPS + run.buffer.count_prompts()
    assert run.limit.tally.lost == 0


@settings(max_examples=at_most(100))
@given(
    st.sampled_from([0, 0.5, 1, 2, 3]),
    st.sampled_from(["wait", "mask", "refresh", "drop"]),
    st.sampled_from(["0", "0.5", "1", "3"]),
    st.integers(0, 2**32 - 1),
)
def test_every_schedule_ends_within_the_limit_at_its_issue(eta: float, too_old: str, stride: str, seed: int) -> None:
    """Prompts take 0 to 8 steps, some of those that are being sampled fail, and eta moves by ``stride``."""
    chance, steps = random.Random(seed), 8
    delays = [chance.choice([0, 0, 0, 1, 2, 8]) for _ in range(10)]
    too_old = too_old if eta else "wait"
    with pytest.MonkeyPatch.context() as patched:
        run = Run(
            patched,
            updates=chance.choice([1, 2, 4]),
            delay=lambda number, times: delays[number % 10],
            eta=eta,
            too_old=too_old,
        )
        for _ in range(steps):
            if too_old != "drop":  # refused next to an eta that moves
                moved = run.limit.rate_limit.eta + chance.choice([-1, 0, 0, 1]) * Fraction(stride)
                run.limit._change_eta(run.step, max(moved, Fraction(0)))
            run.train(1)
            running = sorted(uid for uid, tag in run.queue.tags.items() if tag.get("status") == "running")
            for uid in running[: chance.choice([0, 0, 1, 2])]:
                run.fail(uid)
        waiting, limit = run.buffer.count_prompts(), run.limit.age_limit
    assert len(run.trained) == len({uid for _, uid, _ in run.trained}) == 4 * steps
    assert run.limit.rate_limit.account == 4 * steps + waiting
    exempt = {"wait": (), "drop": (), "refresh": (".2",), "mask": ("",)}[too_old]
    # A row's version is that of the step before its issue.
    assert all(age <= limit.get_oldest(step - age) for step, uid, age in run.trained if not uid.endswith(exempt))


def test_a_failed_prompt_is_replaced_and_the_limit_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, eta=1, delay=lambda number, times: 1)
    run.trainer._add_batch_to_generate()
    assert run.limit.rate_limit.account == 8
    run.fail("u0")
    run.train(1)
    assert (run.limit.rate_limit.account, run.limit.tally.issued) == (8, 9)
    assert "u0" not in {uid for _, uid, _ in run.trained}


def test_prompts_that_vanish_are_replaced_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without that the trainer would wait for ever for prompts that no one samples."""
    run = Run(monkeypatch, eta=0)
    run.train(1)
    run.limit.rate_limit.account += 4
    run.train(1)
    assert run.limit.tally.lost == 4
    assert "4 prompts were lost" in caplog.text
    assert max(run.ages()) == 0


def test_a_refreshed_prompt_comes_under_its_own_name_and_at_last_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt 3 takes 4 steps each time, and others none: twice sampled again, then handed out too old."""
    run = Run(monkeypatch, eta=1, too_old="refresh", delay=lambda number, times: 4 if number == 3 else 0)
    run.train(20)
    (found,) = [(uid, age) for _, uid, age in run.trained if uid.startswith("u3") and uid.partition(".")[0] == "u3"]
    assert found == ("u3.2", 4)
    assert max(age for _, uid, age in run.trained if uid != "u3.2") == 1
    assert run.limit.tally.refreshed == 2
    assert run.limit.rate_limit.account == 4 * 20 + run.buffer.count_prompts()
    assert (run.limit.tally.too_old.total, run.limit.tally.too_old.count) == (2 * 2 * LONG, 4)


def test_a_refreshed_prompt_that_is_quick_the_second_time_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, eta=1, too_old="refresh", delay=lambda number, times: 4 if number == 3 and not times else 0)
    run.train(12)
    assert [(uid, age <= 1) for _, uid, age in run.trained if uid.startswith("u3.")] == [("u3.1", True)]
    assert {f"u{number}" for number in range(40)} - {"u3"} <= {uid for _, uid, _ in run.trained}


def test_dropped_stragglers_are_never_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, eta=2, too_old="drop", delay=rarely)
    run.train(20)
    assert not [uid for _, uid, _ in run.trained if rarely(int(uid[1:]))]
    assert max(run.ages()) == 2
    assert run.limit.tally.lost == 4
    assert run.limit.tally.too_old.value == LONG
    assert run.limit.rate_limit.account == 4 * 20 + run.buffer.count_prompts()


def test_what_the_trainer_waits_for_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from verl.trainer.ppo.v1 import replay_buffer

    monkeypatch.setattr(replay_buffer, "VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS", -1)
    run = Run(monkeypatch, eta=1, delay=lambda number, times: 9 if number == 2 else 0)
    run.train(2)
    assert "the oldest, u2, was issued in step 1 (offpolicy.staleness.eta=1, too_old=wait)" in caplog.text


def test_only_the_wait_for_training_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, times = Run(monkeypatch, eta=2), iter([10.0, 12.5, 20.0, 29.0])
    run.buffer._clock = lambda: next(times)
    monkeypatch.setattr(type(run.buffer).__mro__[1], "wait_for_sampleable", lambda self, *args: (set(), {}))
    run.buffer.wait_for_sampleable(1, "train", 4)
    run.buffer.wait_for_sampleable(1, "val", 4)
    assert run.limit.tally.waited == 2.5
