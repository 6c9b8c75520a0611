"""The properties of a run that make it off-policy: given under ``setup``, or read from verl's keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from verl_patches.execution_path import STRATEGY, count_prompts

from ..batch.declared_keys import Section, choice, count
from ..correction import SpecError
from ..correction.problem import CheckError, find_unmet
from ..replay.replay_settings import MEGATRON_ROUTER_REPLAY, RECORDED, ROUTER_REPLAY, list_requirements, replays_on_fsdp
from ..staleness.staleness_settings import TARGET
from .composed import ACTOR, BATCH, LOSS_MODE, MINI_BATCH, MODE, NAME, ROLLOUT, UNTESTED_ENGINES, Composed
from .model_files import find_experts

Engine = Literal["same", "different"]
Mode = Literal["sync", "async"]
Model = Literal["dense", "moe"]
Trajectory = Literal["single", "tools"]

KEYS = Section(
    "setup",
    dict.fromkeys(("engine", "mode", "model", "trajectory", "minibatches")),
    {
        "engine": choice(*get_args(Engine), null="to find out"),
        "mode": choice(*get_args(Mode), null="to find out"),
        "model": choice(*get_args(Model), null="to find out"),
        "trajectory": choice(*get_args(Trajectory), null="to find out"),
        "minibatches": count("a number of gradient steps, 1 or more, or null to count them", null=True),
    },
)


@dataclass(frozen=True)
class Setup:
    """The properties of a run that make it off-policy.

    Attributes:
        engine: whether rollouts come from the trainer's own engine.
        mode: whether rollouts overlap with training.
        model: ``moe`` for a mixture of experts.
        trajectory: ``tools`` if tool outputs stand between the model's own tokens.
        minibatches: gradient steps per batch: global batch size / mini-batch size, times epochs.
        strategy: verl's name for the training backend, which decides whether routes can be replayed.
        objective: verl's name for the base loss; GSPO replaces routing replay.
        bounded: ``offpolicy.staleness.eta`` limits staleness.
        adaptive: the staleness limit moves, up to a ceiling.
        program: the verl program with its own staleness, fully_async or one_step_off; None for main_ppo.
        resumes: fully_async continues requests that a weight synchronisation has aborted.
        fsdp_replay: routes can be replayed on FSDP in this configuration.
    """

    engine: Engine
    mode: Mode
    model: Model
    trajectory: Trajectory
    minibatches: int
    strategy: str
    objective: str = "vanilla"
    bounded: bool = False
    adaptive: bool = False
    fsdp_replay: bool = False
    program: str | None = None
    resumes: bool = True

    @property
    def replay_mode(self) -> str | None:
        """The key that controls routing replay; None if nothing replays routes."""
        if self.strategy == "megatron":
            return f"{MEGATRON_ROUTER_REPLAY}.mode"
        return f"{ROUTER_REPLAY}.mode" if self.fsdp_replay else None


def read_setup(run: Composed) -> Setup:
    """Read the set-up of a composed configuration from ``setup.*`` if given, else from verl's keys.

    Raises:
        CheckError: unknown keys or values.
        SpecError: a value is neither given nor known, or a given value contradicts the configuration.
    """
    given, values = _read_given(run), dict[str, Any]()
    for name, (look, reason, fix) in _LOOKS.items():
        key, seen, value = f"setup.{name}", look(run), given[name]
        if value is None and seen is None:
            raise SpecError(f"correction=auto needs this value, and {reason}", fix, key=key)
        if value is not None and seen is not None and seen.firm and seen.value != value:
            fix = f"Set {key}=null to use the value of the configuration, or change the configuration."
            raise SpecError(f"the configuration says {seen.value}: {seen.source}.", fix, key=key, value=value)
        values[name] = seen.value if value is None and seen is not None else value
    unmet = find_unmet(list_requirements("R3"), run.get, "", ())
    return Setup(
        **values,
        strategy=str(run.get(STRATEGY) or "unknown"),
        objective=str(run.get(LOSS_MODE) or "vanilla"),
        bounded=run.staleness is not None,
        adaptive=run.staleness is not None and run.get(TARGET) is not None,
        fsdp_replay=replays_on_fsdp(run.path) and not list(unmet),
        program=run.program,
        resumes=bool(run.get("async_training.partial_rollout", True)),
    )


def refuse_setup(run: Composed) -> None:
    """Refuse keys under ``setup`` if corrections are chosen by name, because then nothing reads ``setup``.

    Raises:
        CheckError: unknown keys or values.
        SpecError: a key under ``setup`` is set.
    """
    for name, value in _read_given(run).items():
        if value is not None:
            key = f"setup.{name}"
            raise SpecError(
                "only correction=auto reads it.", f"Set correction=auto, or {key}=null.", key=key, value=value
            )


def _read_given(run: Composed) -> dict[str, Any]:
    given = KEYS.read(run.config)
    if problems := list(KEYS.check(given)):
        raise CheckError(problems)
    return {**KEYS.shipped, **(given or {})}


@dataclass(frozen=True)
class _Observed:
    """A value that the configuration shows, and its source; not ``firm`` if the user may know better."""

    value: Any
    source: str
    firm: bool = True


def _find_engine(run: Composed) -> _Observed | None:
    name = run.get(NAME)
    # Kernels can be matched until both engines are bitwise identical; no key shows this, so only the user knows it.
    return _Observed("different", f"{NAME}={name}", firm=False) if name in ("vllm", *UNTESTED_ENGINES) else None


def _find_mode(run: Composed) -> _Observed | None:
    if run.program is not None:
        return _Observed("async", f"the program is {run.program}_policy")
    if run.get("trainer") and not run.get("trainer.use_v1", False):
        return _Observed("sync", "the V0 trainer")
    mode = run.get(MODE)
    return None if mode is None else _Observed("sync" if mode == "sync" else "async", f"{MODE}={mode}")


def _find_model(run: Composed) -> _Observed | None:
    for key in (f"{MEGATRON_ROUTER_REPLAY}.mode", f"{ROUTER_REPLAY}.mode"):
        if (mode := run.get(key)) not in (None, "disabled"):
            return _Observed("moe", f"{key}={mode}")
    if run.get(RECORDED):
        return _Observed("moe", f"{RECORDED}=true")
    experts = find_experts(run.config)
    return None if experts is None else _Observed("moe" if experts[0] else "dense", experts[1])


def _find_trajectory(run: Composed) -> _Observed | None:
    turns, loop = f"{ROLLOUT}.multi_turn.enable", f"{ROLLOUT}.agent.default_agent_loop"
    enabled, agent = run.get(turns), run.get(loop)
    if enabled:
        return _Observed("tools", f"{turns}=true")
    if agent not in (None, "single_turn_agent"):
        return _Observed("tools", f"{loop}={agent}", firm=False)
    # A data set may name an agent loop per row.
    return None if enabled is None else _Observed("single", f"{turns}=false", firm=False)


def _count_minibatches(run: Composed) -> _Observed | None:
    keys = (BATCH, MINI_BATCH, f"{ACTOR}.ppo_epochs")
    sizes = [count_prompts(run.config), *map(run.get, keys[1:])]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    batch, mini_batch, epochs = sizes
    source = ", ".join(f"{key}={size}" for key, size in zip(keys, sizes, strict=True))
    return _Observed(math.ceil(batch / mini_batch) * epochs, source)


_LOOKS: dict[str, tuple[Callable[[Composed], _Observed | None], str, str]] = {
    "engine": (_find_engine, f"{NAME} is not a known engine.", "Set setup.engine=different, or same."),
    "mode": (_find_mode, f"{MODE} is not set.", "Set setup.mode=sync, or async."),
    "model": (
        _find_model,
        "the model's config.json is not on this machine.",
        "Set setup.model=dense, or moe for a mixture of experts.",
    ),
    "trajectory": (
        _find_trajectory,
        f"{ROLLOUT}.multi_turn.enable is not set.",
        "Set setup.trajectory=single, or tools.",
    ),
    "minibatches": (
        _count_minibatches,
        f"{BATCH}, {MINI_BATCH} and {ACTOR}.ppo_epochs do not determine it.",
        "Set setup.minibatches=1, or more.",
    ),
}
"""Key -> the value that the configuration shows, why it may show none, and what to do then."""
