"""A run that is stuck, or has lost a worker, ends by itself and says where."""

from __future__ import annotations

import asyncio
import inspect
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.fault_tolerance.watchdog import NAMES, Phases, Watchdog, WatchdogError, find_problems, watch
from tests.support.paths import ROOT

HANGS = 300.0
"""Seconds after which whatever is waited for will not come."""


class Clock:
    """Moved by hand: a limit strikes where a test says so, however busy the machine is."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def hang(self) -> None:
        """A wait for what does not come, for ten minutes by this clock."""
        self.now += 600.0
        threading.Event().wait(HANGS)


def config(**settings: Any) -> DictConfig:
    values = {"step_timeout": 1800, "phase_timeouts": {"start": 7200}, "poll": 10} | settings
    return OmegaConf.create({"offpolicy": {"watchdog": values}})


def test_a_phase_is_overdue_from_its_own_beginning() -> None:
    clock = Clock()
    phases = Phases({"rollout": 50.0}, 20.0, clock)
    with phases.enter("rollout"):
        # A rollout that fails and is asked for again goes in and out of other phases all the time.
        for _ in range(6):
            clock.now += 9.0
            with phases.enter("engine_sleep"):
                pass
        sentence = phases.describe_overdue()
    assert sentence is not None
    assert "rollout is stuck: it has taken 54 s, limit 50 s" in sentence
    assert "offpolicy.watchdog.phase_timeouts.rollout" in sentence
    assert phases.describe_overdue() is None


def test_the_inner_phase_is_named_first() -> None:
    clock = Clock()
    phases = Phases({}, 20.0, clock)
    with phases.enter("validation"), phases.enter("rollout"):
        clock.now += 21.0
        sentence = phases.describe_overdue()
        assert phases.list_current() == [("validation", 21.0), ("rollout", 21.0)]
    assert sentence is not None
    assert "rollout is stuck: it has taken 21 s within validation" in sentence
    assert "raise offpolicy.watchdog.step_timeout" in sentence


def test_the_time_between_phases_counts() -> None:
    clock = Clock()
    phases = Phases({}, 20.0, clock)
    clock.now += 15.0
    with phases.enter("rollout"):
        pass
    clock.now += 15.0
    assert phases.describe_overdue() is None
    clock.now += 6.0
    assert "between_phases is stuck" in str(phases.describe_overdue())


def test_no_limit_is_any_time() -> None:
    clock = Clock()
    phases = Phases({"rollout": None}, 20.0, clock)
    with phases.enter("rollout"):
        clock.now += 1e6
        assert phases.describe_overdue() is None
    unlimited = Phases({"rollout": 5.0}, None, clock)
    clock.now += 1e6
    assert unlimited.describe_overdue() is None


@pytest.fixture
def started() -> Iterator[Callable[..., Watchdog]]:
    """Starts watchdogs that never end this process, and stops them."""
    watchdogs: list[Watchdog] = []

    def start(phases: Phases, **kwargs: Any) -> Watchdog:
        watchdogs.append(Watchdog(phases, poll=0.05, end=lambda code: None, **kwargs))
        watchdogs[-1].start()
        return watchdogs[-1]

    yield start
    for watchdog in watchdogs:
        watchdog.stop()


def test_the_main_thread_raises_the_verdict(
    started: Callable[..., Watchdog], capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    clock = Clock()
    watchdog = started(Phases({}, 60.0, clock), step=lambda: 7)
    expected = pytest.raises(WatchdogError, match=r"weight_sync is stuck: .* Step 7, phase weight_sync \(600 s\)")
    with expected, watchdog.phase("weight_sync"):
        clock.hang()
    # Where everybody is, for whoever looks for the reason.
    assert "test_the_main_thread_raises_the_verdict" in capfd.readouterr().err
    watchdog.stop()
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_lost_worker_ends_the_run(started: Callable[..., Watchdog]) -> None:
    died = threading.Event()
    looks: list[bool] = []

    def look() -> str | None:
        looks.append(died.is_set())
        return "a worker of llm_server_manager has died: killed." if looks[-1] else None

    watchdog = started(Phases({}, None), lost=look)
    expected = pytest.raises(WatchdogError, match=r"llm_server_manager has died: killed\. Step \?, phase rollout")
    with expected, watchdog.phase("rollout"):
        died.set()
        threading.Event().wait(HANGS)
    assert looks.count(True) == 1


def test_a_look_that_fails_leaves_the_limits(started: Callable[..., Watchdog]) -> None:
    clock, looked = Clock(), threading.Event()

    def look() -> str | None:
        looked.set()
        raise OSError("no answer")

    watchdog = started(Phases({}, 60.0, clock), lost=look)
    assert looked.wait(HANGS)
    with pytest.raises(WatchdogError, match="rollout is stuck"), watchdog.phase("rollout"):
        clock.hang()


def test_a_wait_that_no_signal_wakes_is_released(started: Callable[..., Watchdog]) -> None:
    """ray.get in an actor goes on waiting; it ends when the actor that it waits for is killed."""
    clock, answer = Clock(), threading.Event()

    def ray_get() -> None:
        # Signals are held back, as by code that never comes back to Python.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        try:
            clock.now += 600.0
            assert answer.wait(HANGS)
            raise OSError("the actor died")
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])

    watchdog = started(Phases({}, 60.0, clock), patience=0.3, release=answer.set)
    with pytest.raises(WatchdogError, match="rollout is stuck"), watchdog.phase("rollout"):
        ray_get()


def test_what_the_interrupted_call_makes_of_it_is_not_shown(started: Callable[..., Watchdog]) -> None:
    """Some calls raise an error of their own instead of what the signal's handler raised."""

    clock = Clock()

    def ray_get() -> None:
        try:
            clock.hang()
        except KeyboardInterrupt as error:
            raise SystemError("returned a result with an exception set") from error

    watchdog = started(Phases({}, 60.0, clock))
    with pytest.raises(WatchdogError, match="rollout is stuck"), watchdog.phase("rollout"):
        ray_get()


def test_other_errors_are_left_alone(started: Callable[..., Watchdog]) -> None:
    watchdog = started(Phases({}, 60.0, Clock()))
    with pytest.raises(KeyError, match="mine"), watchdog.phase("rollout"):
        raise KeyError("mine")
    assert watchdog.phases.list_current()[0][0] == "between_phases"


class Manager:
    """Stands in for verl's checkpoint manager and rollout."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.calls = work, 0

    def update_weights(self, step: int) -> int:
        self.calls += 1
        self.work()
        return step + 1


class Trainer:
    """What V1 does: parts are made by ``_setup``, and used after."""

    def __init__(self, work: Callable[[], None] = lambda: None) -> None:
        self.global_steps = 3
        self._work = work

    def _setup(self) -> None:
        self.checkpoint_manager = Manager(self._work)

    def _update_actor(self, batch: str, metrics: dict[str, Any]) -> str:
        return f"{batch} updated"

    def fit(self) -> str:
        self._setup()
        batch = self._update_actor("batch", {})
        self.checkpoint_manager.update_weights(1)
        return batch


class AwaitedTrainer(Trainer):
    """As of fully_async_policy and one_step_off_policy: ``fit`` returns before anything has happened."""

    async def fit(self) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return Trainer.fit(self)


def run(trainer: Trainer) -> str:
    result: Any = trainer.fit()
    return asyncio.run(result) if inspect.isawaitable(result) else result  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Trainer, AwaitedTrainer])
def test_parts_made_later_are_watched(kind: type[Trainer]) -> None:
    clock = Clock()
    trainer = kind(clock.hang)
    watchdog = watch(trainer, config(step_timeout=60, poll=0.05), clock)
    assert watchdog is not None
    try:
        with pytest.raises(WatchdogError, match=r"weight_sync is stuck.* Step 3, phase weight_sync"):
            run(trainer)
    finally:
        watchdog.stop()


@pytest.mark.parametrize("kind", [Trainer, AwaitedTrainer])
def test_a_healthy_run_is_left_alone(kind: type[Trainer]) -> None:
    trainer = kind()
    watchdog = watch(trainer, config(poll=None), Clock())
    assert watchdog is not None
    assert run(trainer) == "batch updated"
    assert trainer.checkpoint_manager.calls == 1
    watchdog._thread.join(HANGS)
    assert not watchdog._thread.is_alive()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_switched_off() -> None:
    trainer = Trainer()
    assert watch(trainer, config(step_timeout=None, phase_timeouts={}, poll=None)) is None
    assert watch(trainer, config(step_timeout=None, phase_timeouts={"rollout": None}, poll=None)) is None


@pytest.mark.slow  # a process of its own
def test_a_process_that_does_not_unwind_is_ended(tmp_path: Path) -> None:
    """Code that swallows every error, in a process of its own: it is ended all the same."""
    program = textwrap.dedent("""
        import time
        from recipe.offpolicy.fault_tolerance.watchdog import Phases, Watchdog
        now = 0.0
        watchdog = Watchdog(Phases({}, 60.0, lambda: now), poll=0.05, grace=0.5)
        watchdog.start()
        with watchdog.phases.enter("checkpoint"):
            while True:
                try:
                    now = 600.0
                    time.sleep(30)
                except BaseException:
                    pass
    """)
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 70
    assert "checkpoint is stuck" in ended.stderr
    assert re.search(r"told to end, because checkpoint is stuck.* did not end within", ended.stderr)


def test_a_failed_run_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something at the end of the task, after another error, waits for a process that will not answer."""
    ended = threading.Event()
    monkeypatch.setattr("recipe.offpolicy.fault_tolerance.watchdog._in_ray_actor", lambda: True)
    trainer = Trainer()
    trainer._update_actor = None  # type: ignore[assignment]
    clock, looks = Clock(), threading.Semaphore(0)

    def time_of_look() -> float:
        looks.release()
        return clock.now

    watchdog = watch(trainer, config(poll=0.05), time_of_look, grace=60.0, end=lambda code: ended.set())
    assert watchdog is not None
    try:
        with pytest.raises(TypeError):
            trainer.fit()
        clock.now += 59.0
        while looks.acquire(blocking=False):
            pass
        assert looks.acquire(timeout=HANGS)
        assert looks.acquire(timeout=HANGS)  # after one that found it within its grace
        assert not ended.is_set()
        clock.now += 2.0
        assert ended.wait(HANGS)
    finally:
        watchdog.stop()


@pytest.mark.parametrize("version", ["v0", "v1", "separate"])
def test_the_phases_of_a_step_are_watched_on_each_trainer(version: str) -> None:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    classes = {"v0": RayPPOTrainer, "v1": PPOTrainerSync, "separate": PPOTrainerSeparateAsync}
    trainer: Any = object.__new__(classes[version])
    trainer.checkpoint_manager = SimpleNamespace(update_weights=lambda step: None, sleep_replicas=lambda: None)
    trainer.async_rollout_manager = SimpleNamespace(generate_sequences=lambda batch: None)
    trainer.standalone_checkpoint_manager = SimpleNamespace(update_weights=lambda step: None)
    trainer.replay_buffer = SimpleNamespace(sample=lambda **kwargs: None, wait_for_sampleable=lambda: None)
    watchdog = watch(trainer, config(poll=None))
    assert watchdog is not None
    watchdog.stop()
    methods = {"_update_actor", "_compute_old_log_prob", "_save_checkpoint", "_load_checkpoint", "fit"}
    assert methods <= vars(trainer).keys()
    for part in (
        trainer.checkpoint_manager.update_weights,
        trainer.standalone_checkpoint_manager.update_weights,
        trainer.replay_buffer.sample,
    ):
        assert part.__name__ == "<lambda>"
        assert part.__wrapped__ is not None


def test_problems_name_key_value_and_fix() -> None:
    assert list(find_problems(config())) == []
    assert list(find_problems(config(step_timeout=None, poll=None, phase_timeouts={"rollout": None}))) == []
    unknown, limit = find_problems(config(phase_timeouts={"rolout": 5, "rollout": True}))
    assert (unknown.key, limit.key) == tuple(
        f"offpolicy.watchdog.phase_timeouts.{name}" for name in ("rolout", "rollout")
    )
    assert "rollout" in unknown.advice
    for settings in (None, {"phase_timeouts": None}):
        (problem,) = find_problems(OmegaConf.create({"offpolicy": {"watchdog": settings}}))
        assert problem.overrides == ()
    assert "between_phases" in NAMES
