"""A run that hangs, or has lost a worker, ends by itself and says where."""

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
import ray
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError

from recipe.offpolicy.fault_tolerance.watchdog import (
    LostWorkerDetector,
    Phases,
    Watchdog,
    WatchdogError,
    end_workers,
    summarize_death,
    watch,
)
from tests.support.paths import ROOT

HANGS = 300.0
"""Seconds after which a transfer counts as hanging."""


class Clock:
    """A clock that is moved by hand, so a limit is reached exactly when a test says so, even on a busy machine."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def hang(self) -> None:
        """Wait ten minutes, by this clock, for something that does not come."""
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
    assert "rollout is stuck: it has taken 54 s, limit 50 s" in sentence
    assert "offpolicy.watchdog.phase_timeouts.rollout" in sentence
    assert phases.describe_overdue() is None


@pytest.fixture
def started() -> Iterator[Callable[..., Watchdog]]:
    """Start watchdogs that never end this process, and stop them."""
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


def test_a_wait_that_no_signal_wakes_is_released(started: Callable[..., Watchdog]) -> None:
    """ray.get in an actor keeps waiting; it ends when the actor that it waits for is killed."""
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


class Manager:
    """A stand-in for verl's checkpoint manager and rollout."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.calls = work, 0

    def update_weights(self, step: int) -> int:
        self.calls += 1
        self.work()
        return step + 1


class Trainer:
    """Do what V1 does: ``_setup`` creates the parts, and later calls use them."""

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
    """A trainer like those of fully_async_policy and one_step_off_policy: ``fit`` returns before anything has
    happened.
    """

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
    try:
        with pytest.raises(WatchdogError, match=r"weight_sync is stuck.* Step 3, phase weight_sync"):
            run(trainer)
    finally:
        watchdog.stop()


def test_a_healthy_run_is_left_alone() -> None:
    trainer = AwaitedTrainer()
    watchdog = watch(trainer, config(poll=None), Clock())
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
    """Code that swallows every error, in its own process, is ended as well."""
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


WORKER, SERVER = (SimpleNamespace(name=name, __ray_ready__=None) for name in ("worker", "server"))


def holder() -> Any:
    return SimpleNamespace(
        actor_rollout_wg=SimpleNamespace(workers=[WORKER]),
        critic_wg=None,
        llm_server_manager=SimpleNamespace(server_handles=[SERVER, "no actor"]),
    )


def test_all_are_ended_also_after_one_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []

    def kill(handle: Any) -> None:
        ended.append(handle)
        if handle is WORKER:
            raise RuntimeError("it has died already")

    monkeypatch.setattr(ray, "kill", kill)
    end_workers(holder())
    assert ended == [WORKER, SERVER]


# As Ray words what its memory monitor did, shortened.
SHORT_OF_MEMORY = """4 worker(s) were killed due to the node running low on memory. Memory was 22.49GB of 23.54GB
OOM kill reason: Memory usage 24064483328B exceeded threshold of 24012677120B
RayError: not of the constructor
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
18716\t14.16\tpython greedy.py --all
20508\t1.79\tVLLM::Worker
"""


def test_a_death_for_want_of_memory_names_the_largest_process() -> None:
    assert summarize_death(OutOfMemoryError(SHORT_OF_MEMORY)) == (
        "4 worker(s) were killed due to the node running low on memory. Memory was 22.49GB of 23.54GB; "
        "the largest process has 14.16 GB: python greedy.py --all"
    )


class Handle:
    """A handle of an actor, whose pending answer is its name."""

    def __init__(self, name: str) -> None:
        self.__ray_ready__ = None
        self.__ray_call__ = SimpleNamespace(remote=lambda *_: name)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OutOfMemoryError(SHORT_OF_MEMORY), "a worker of actor_rollout_wg has died: 4 worker(s) were killed"),
        (RayActorError(error_msg="gone"), "a worker of actor_rollout_wg has died: gone"),
        (ActorUnavailableError("away", b"0" * 16), None),
    ],
    ids=["memory", "death", "broken connection"],
)
def test_a_dead_worker_is_told_whatever_ended_it(
    monkeypatch: pytest.MonkeyPatch, error: RayError, said: str | None
) -> None:
    """An actor that the memory monitor ended counts as dead; a broken connection may come back."""
    holder = SimpleNamespace(
        actor_rollout_wg=SimpleNamespace(workers=[Handle("dead")]),
        reward_loop_manager=SimpleNamespace(reward_loop_workers=[Handle("busy")]),
    )

    def get(answer: str) -> None:
        assert answer == "dead"
        raise error

    monkeypatch.setattr(ray, "wait", lambda waiting, **_: ([each for each in waiting if each == "dead"], []))
    monkeypatch.setattr(ray, "get", get)
    found = LostWorkerDetector(holder)()
    assert found == said if said is None else found is not None and found.startswith(said)


@pytest.mark.parametrize("failure", [None, "rollout server 0 could not run update_weights_from_ipc: RuntimeError: no"])
def test_a_worker_that_lives_tells_its_failure(monkeypatch: pytest.MonkeyPatch, failure: str | None) -> None:
    holder = SimpleNamespace(llm_server_manager=SimpleNamespace(server_handles=[Handle("alive")]))
    monkeypatch.setattr(ray, "wait", lambda waiting, **_: (waiting, []))
    monkeypatch.setattr(ray, "get", lambda answer: failure)
    assert LostWorkerDetector(holder)() == (failure and f"a worker of llm_server_manager has failed: {failure}")
