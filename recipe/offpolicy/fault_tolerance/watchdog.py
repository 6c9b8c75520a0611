"""A watchdog thread that ends a run within a bounded time if it hangs or a worker has died, and names the phase.

verl waits for its workers without a timeout, so if a weight sync or a rollout engine hangs, the run stays alive but
makes no progress. A thread in the trainer's process tracks the current phase of the step through wrapped methods.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..batch.declared_keys import Section, number, read_shipped_defaults
from ..correction import Problem

logger = logging.getLogger("verl.offpolicy")

PHASES: Mapping[str, str] = {
    "_setup": "start",
    "init_workers": "start",
    "replay_buffer.sample": "rollout",
    "replay_buffer.wait_for_sampleable": "rollout",
    "async_rollout_manager.generate_sequences": "rollout",
    "_get_samples_from_queue": "rollout",
    "checkpoint_manager.sleep_replicas": "engine_sleep",
    "_compute_old_log_prob": "old_log_prob",
    "_compute_ref_log_prob": "ref_log_prob",
    "_compute_values": "values",
    "_compute_reward_colocate": "reward",
    "_update_critic": "update_critic",
    "_update_actor": "update_actor",
    "checkpoint_manager.update_weights": "weight_sync",
    "standalone_checkpoint_manager.update_weights": "weight_sync",
    "_save_checkpoint": "checkpoint",
    "_load_checkpoint": "load_checkpoint",
    "_validate": "validation",
}
"""Maps methods of the trainer to their phases, for all trainers and releases; each trainer has only some of them."""
BETWEEN = "between_phases"  # the driver's own work, such as rewards, advantages, metrics and logging
NAMES = tuple(sorted({*PHASES.values(), BETWEEN}))

SECTION = "offpolicy.watchdog"
SIGNAL = signal.SIGUSR2  # interrupts the main thread; its handler raises an exception
PATIENCE, GRACE, EXIT_CODE = 5.0, 60.0, 70
"""Seconds from the signal to ``Watchdog.release``, seconds from then until the process is killed, and its exit
status."""


HOLDERS = (
    "actor_rollout_wg.workers",
    "critic_wg.workers",
    "ref_policy_wg.workers",
    "llm_server_manager.server_handles",
    "standalone_server_manager.server_handles",
    "async_rollout_manager.server_handles",
    "checkpoint_manager.replicas.servers",
    "async_rollout_manager.agent_loop_workers",
    "agent_loop_manager.agent_loop_workers",
    "reward_loop_manager.reward_loop_workers",
)
"""Trainer attributes that hold Ray actors, in verl 0.7.1 to 0.9.1; each trainer has only some of them."""
FAILURE = "_offpolicy_failure"  # attribute in which an actor stores its failure message


class LostWorkerDetector:
    """Callable that returns an error message if a Ray actor of the trainer has died or reports a failure, else None.

    verl notices a dead worker only when it waits for that worker's answer. An engine that raises while loading weights
    stays alive, and the sender waits for its acknowledgement. This detector therefore keeps one call of Ray's
    ``__ray_call__`` pending on each actor, which reads ``FAILURE``. On a busy actor, the call stays in the queue; on a
    dead actor, it fails at once with the cause of death.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # Maps a reference to a pending answer to the actor that will give the answer.
        self._waiting: dict[Any, Any] = {}

    def __call__(self) -> str | None:
        import ray
        from ray import exceptions as of_ray

        # If Ray's memory monitor kills an actor, the error is not a RayActorError.
        deaths = of_ray.RayActorError, of_ray.OutOfMemoryError, of_ray.NodeDiedError, of_ray.WorkerCrashedError
        listed = {handle: holder for holder, handle in list_actor_handles(self._trainer)}
        for handle in listed.keys() - self._waiting.values():
            # getattr is a builtin, so every process has it.
            self._waiting[handle.__ray_call__.remote(getattr, FAILURE, None)] = handle
        if not self._waiting:
            return None
        answers, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=0)
        lost = []
        for answer in answers:
            handle = self._waiting.pop(answer)
            try:
                failure = ray.get(answer)
            except of_ray.ActorUnavailableError:
                continue  # Ray also raises this error for a broken connection, which may recover
            except deaths as error:
                failure, kind = summarize_death(error) or type(error).__name__, "died"
            else:
                kind = "failed"
            # An actor that the trainer no longer lists was ended intentionally.
            if failure and handle in listed:
                lost.append(f"a worker of {listed[handle]} has {kind}: {failure}")
        return " ".join(lost) or None


def summarize_death(error: Exception) -> str:
    """Summarize in one line why an actor died: the exceptions of its constructor with the root cause first, or the
    largest process of Ray's memory report, or Ray's whole message."""
    text = str(error)
    if users := re.search(r"^Top \d+ memory users:.*\n\S+\t(\S+)\t(.*)$", text, re.MULTILINE):
        return f"{text.splitlines()[0]}; the largest process has {users[1]} GB: {users[2]}"
    raised = re.findall(r"^[\w.]+(?:Error|Exception|Interrupt)\b.*$", text, re.MULTILINE)
    return " -> ".join(raised) or " ".join(text.split())


def end_workers(trainer: Any) -> None:
    """Kill the trainer's Ray actors, so that callers waiting for them receive an error at once."""
    import ray

    for _, handle in list_actor_handles(trainer):
        with contextlib.suppress(Exception):  # already dead actors
            ray.kill(handle)


def list_actor_handles(trainer: Any) -> Iterator[tuple[str, Any]]:
    """List (trainer attribute, handle) for each Ray actor to which the trainer has a handle."""
    for path in HOLDERS:
        found = [trainer]
        for part in path.split("."):
            values = [getattr(one, part, None) for one in found]
            found = [each for value in values for each in (value if isinstance(value, Iterable) else [value])]
        yield from ((path.split(".")[0], handle) for handle in found if hasattr(handle, "__ray_ready__"))


class WatchdogError(RuntimeError):
    """The run hangs, or a worker has died; the message names the phase."""


class _Interrupt(KeyboardInterrupt):
    """Raised by the signal handler in the main thread; a KeyboardInterrupt, because nothing else ends ``ray.get``."""


@dataclass(eq=False)
class Phases:
    """A thread-safe stack of the trainer's current phases, outermost first, with their start times.

    Args:
        limits: maps each phase to the number of seconds that it may take; None for no limit.
        default: limit in seconds for all other phases.
    """

    limits: Mapping[str, float | None]
    default: float | None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._stack: list[tuple[str, float]] = []
        self._idle_since = self.clock()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """Count the time inside the context for this phase."""
        entry = (name, self.clock())
        with self._lock:
            self._stack.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._stack.remove(entry)
                self._idle_since = self.clock()

    @property
    def shortest(self) -> float:
        """The shortest limit in seconds; infinite if there are no limits."""
        limits = [self.limits.get(name, self.default) for name in {*NAMES, *self.limits}]
        return min((seconds for seconds in limits if seconds is not None), default=math.inf)

    def list_current(self) -> list[tuple[str, float]]:
        """List (phase, seconds spent in it), outermost first; outside all phases, only ``BETWEEN``."""
        now = self.clock()
        with self._lock:
            stack = [(name, now - since) for name, since in self._stack]
            return stack or [(BETWEEN, now - self._idle_since)]

    def describe_overdue(self) -> str | None:
        """Return an error message if a phase has exceeded its limit; otherwise None."""
        current = self.list_current()
        for name, seconds in reversed(current):
            limit = self.limits.get(name, self.default)
            if limit is not None and seconds > limit:
                key = f"{SECTION}.phase_timeouts.{name}" if name in self.limits else f"{SECTION}.step_timeout"
                within = [outer for outer, _ in current if outer != name]
                return (
                    f"{name} is stuck: it has taken {seconds:.0f} s{f' within {within[0]}' if within else ''}, limit "
                    f"{limit:g} s. If it is only slow, raise {key}, or set +{SECTION}.phase_timeouts.{name}."
                )
        return None


@dataclass(eq=False)
class Watchdog:
    """A thread that watches the phases and workers of a run, and ends the run if one of them fails.

    Args:
        lost: returns an error message if a worker has died; called every ``poll`` seconds. None for no check.
        step: returns the trainer's step, for messages.
        release: kills the actors for which the main thread may be waiting; called if the signal does not interrupt it.
        end: exits this process at once; never returns.
    """

    phases: Phases
    lost: Callable[[], str | None] | None = None
    poll: float = 10.0
    step: Callable[[], object] = lambda: "?"
    release: Callable[[], None] = lambda: None
    patience: float = PATIENCE
    grace: float = GRACE
    end: Callable[[int], object] = os._exit

    def __post_init__(self) -> None:
        self.verdict: WatchdogError | None = None
        self._unwinding, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="offpolicy-watchdog", daemon=True)
        self._before: Any = None
        self.deadline: float | None = None

    def start(self) -> None:
        """Start watching; call this in the thread that trains."""
        self._main = threading.current_thread()
        if self._main is threading.main_thread():
            # A signal is the only way to raise an exception in a thread that is blocked in C code, as in ray.get.
            self._before = signal.signal(SIGNAL, self._raise)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        self._stopped.set()
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(SIGNAL, self._before)
            self._before = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the context for this phase; a verdict replaces exceptions raised inside."""
        with self.phases.enter(name), self.raise_verdict():
            yield

    @contextlib.contextmanager
    def raise_verdict(self) -> Iterator[None]:
        """Replace exceptions that follow from a verdict with the original WatchdogError."""
        try:
            yield
        except BaseException as error:
            if self.verdict is None or error is self.verdict:
                raise
            self._unwinding.set()
            raise self.verdict from None

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.verdict is not None:
            raise _Interrupt(str(self.verdict))

    def _watch(self) -> None:
        # An overdue phase is noticed after at most a quarter of the shortest limit.
        while not self._stopped.wait(max(0.05, min(self.poll, self.phases.shortest / 4))):
            if self.deadline is not None:
                if self.phases.clock() > self.deadline:
                    self._end_process("the run has failed.")
                    return
            elif sentence := self.phases.describe_overdue() or self._lost_workers():
                self._end_run(sentence)
                return

    def _lost_workers(self) -> str | None:
        try:
            return self.lost() if self.lost else None
        except Exception:
            # The time limits still work and must remain active.
            logger.warning("could not check whether all workers are alive; this check is now disabled.", exc_info=True)
            self.lost = None
            return None

    def _end_run(self, sentence: str) -> None:
        phases = " > ".join(f"{name} ({seconds:.0f} s)" for name, seconds in self.phases.list_current())
        self.verdict = WatchdogError(f"{sentence} Step {self.step()}, phase {phases}.")
        logger.error("the watchdog ends the run. %s", self.verdict)
        # The message is written to descriptor 2, which Ray forwards to the driver even if sys.stderr has been replaced.
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(file=2, all_threads=True)
        if self._before is not None and self._main.ident is not None:
            signal.pthread_kill(self._main.ident, SIGNAL)
            if not self._unwinding.wait(self.patience):
                self.release()
            if self._stopped.wait(self.grace):
                return
        self._end_process(f"the run was told to end, because {sentence}")

    def _end_process(self, why: str) -> None:
        logger.error("%s The run did not end within %.0f s, so its process is killed.", why, self.grace)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self.end(EXIT_CODE)


def watch(
    trainer: Any, config: DictConfig, clock: Callable[[], float] = time.monotonic, **options: Any
) -> Watchdog | None:
    """Start a watchdog for one of verl's trainers; call this once, after construction, in the thread that trains.

    Returns:
        The watchdog, constructed with ``options``; None if no limit is set and the check for dead workers is disabled.
    """
    settings: Any = OmegaConf.to_container(OmegaConf.select(config, SECTION) or OmegaConf.create(), resolve=True)
    poll = settings.get("poll")
    phases = Phases(settings.get("phase_timeouts") or {}, settings.get("step_timeout"), clock)
    if poll is None and phases.shortest == math.inf:
        return None
    watchdog = Watchdog(
        phases,
        lost=LostWorkerDetector(trainer) if poll is not None else None,
        poll=poll or 10.0,
        step=lambda: getattr(trainer, "global_steps", "?"),
        release=lambda: end_workers(trainer),
        **options,
    )
    _wrap_phases(trainer, watchdog)
    _wrap_fit(trainer, watchdog)
    watchdog.start()
    return watchdog


def find_problems(config: DictConfig, extensions: Sequence[str] = ()) -> Iterator[Problem]:
    """Find invalid keys under ``offpolicy.watchdog``; ``extensions`` lists phases in addition to ``NAMES``."""
    settings = OmegaConf.select(config, SECTION)
    if settings is None or (isinstance(settings, DictConfig) and settings.get("phase_timeouts", {}) is None):
        key = SECTION if settings is None else f"{SECTION}.phase_timeouts"
        yield Problem(key, None, "the section is null, so its keys have no values.", "Remove this override.", parts=())
        return
    shipped = read_shipped_defaults("watchdog")
    limits = {**dict.fromkeys((*NAMES, *extensions)), **shipped["phase_timeouts"]}
    seconds = number("a number of seconds above 0, or null for no limit", above=0, null=True)
    keys = ["step_timeout", "poll", *(f"phase_timeouts.{name}" for name in limits)]
    section = Section(
        SECTION,
        {**shipped, "phase_timeouts": limits},
        dict.fromkeys(keys, seconds),
        hints=dict.fromkeys(keys, shipped["step_timeout"]),
    )
    yield from section.find_problems(config)


def _wrap_phases(trainer: Any, watchdog: Watchdog) -> None:
    """Wrap the existing methods of ``PHASES``; after each call, also wrap methods of newly created attributes."""
    wrapped: set[str] = set()

    def bind() -> None:
        for path in PHASES.keys() - wrapped:
            *owners, method = path.split(".")
            owner = functools.reduce(lambda parent, part: getattr(parent, part, None), owners, trainer)
            if callable(call := getattr(owner, method, None)):
                setattr(owner, method, around(call, PHASES[path]))
                wrapped.add(path)

    def around(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def in_phase(*args: Any, **kwargs: Any) -> Any:
            # verl's auto_await returns a coroutine if its caller is a coroutine; otherwise, it runs the coroutine.
            if of_coroutine and sys._getframe(1).f_code.co_flags & inspect.CO_COROUTINE:
                return in_awaited_phase(*args, **kwargs)
            with watchdog.phase(name):
                result = call(*args, **kwargs)
            bind()
            return result

        async def in_awaited_phase(*args: Any, **kwargs: Any) -> Any:
            with watchdog.phase(name):
                result = await call(*args, **kwargs)
            bind()
            return result

        of_coroutine = inspect.iscoroutinefunction(inspect.unwrap(call))
        return in_phase

    bind()


def _wrap_fit(trainer: Any, watchdog: Watchdog) -> None:
    fit = trainer.fit

    @functools.wraps(fit)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with _failing(watchdog):
            result = fit(*args, **kwargs)
            if inspect.isawaitable(result):
                return awaited(result)
        watchdog.stop()
        return result

    async def awaited(result: Any) -> Any:
        with _failing(watchdog):
            found = await result
        watchdog.stop()
        return found

    trainer.fit = watched


@contextlib.contextmanager
def _failing(watchdog: Watchdog) -> Iterator[None]:
    """Raise the verdict if there is one; after any other failure, limit the time for unwinding."""
    try:
        with watchdog.raise_verdict():
            yield
    except BaseException:
        if watchdog.verdict is None:
            # The clean-up may end this process before other code reports the error.
            logger.exception("the run has failed.")
        if _in_ray_actor():
            # The clean-up, for example the closing of a store, may wait for processes that no longer answer.
            watchdog.deadline = watchdog.phases.clock() + watchdog.grace
        elif watchdog.verdict is None:
            watchdog.stop()
        raise


def _in_ray_actor() -> bool:
    import ray

    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
