"""The set-up of a run that makes it off-policy: given under ``setup``, or read from verl's keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import count_prompts, find_program_mode, live_path

from ..correction import SpecError
from ..correction.requirement import find_unmet
from ..correction.spelling import find_closest
from ..replay.obstacles import list_requirements
from ..replay.replay_settings import ROUTER_REPLAY, replays_on_fsdp
from ..staleness.staleness_settings import ETA, TARGET
from .model_config import find_experts

Engine = Literal["same", "different"]
Mode = Literal["sync", "async"]
Model = Literal["dense", "moe"]
Trajectory = Literal["single", "tools"]

REPLAYING = ("megatron",)  # strategies on which verl itself replays routes, of those that are covered
_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT_ENGINES = ("vllm", "sglang", "trtllm")


@dataclass(frozen=True)
class Setup:
    """The properties of a run that make it off-policy.

    Attributes:
        engine: whether rollouts come from the trainer's own engine.
        mode: whether rollouts overlap with training.
        model: ``moe`` for a mixture of experts.
        trajectory: ``tools`` where tool outputs stand between the model's own tokens.
        minibatches: gradient steps on each batch: global batch over mini-batch, times epochs.
        strategy: verl's name of the training backend, which decides whether routes can be replayed.
        objective: verl's name of the base loss; GSPO takes the place of routing replay.
        bounded: ``offpolicy.staleness.eta`` limits staleness.
        adaptive: it moves, up to a ceiling.
        program: of verl, with staleness of its own: fully_async or one_step_off; None for main_ppo.
        resumes: fully_async goes on with requests that a synchronisation of weights has aborted.
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
        """The key that decides about routing replay; None where nothing replays routes."""
        if self.strategy in REPLAYING:
            return f"{_ACTOR}.{self.strategy}.router_replay.mode"
        return f"{ROUTER_REPLAY}.mode" if self.fsdp_replay else None


def read_setup(config: DictConfig) -> Setup:
    """Read the set-up of a composed configuration: ``setup.*`` where given, else from verl's keys.

    Raises:
        SpecError: unknown keys or values, what is neither given nor known, and what is given and contradicted.
    """
    given = _read_given(config)
    values: dict[str, Any] = {}
    for name, look in _LOOKS.items():
        seen = look(config)
        if given[name] is None:
            if seen is None:
                reason, fix = _WHY_UNKNOWN[name]
                raise SpecError(f"correction=auto needs it, and {reason}", fix, key=f"setup.{name}")
            values[name] = seen.value
        elif seen is not None and seen.firm and seen.value != given[name]:
            raise SpecError(
                f"the configuration says {seen.value}: {seen.source}.",
                f"Set setup.{name}=null to follow it, or change the configuration.",
                key=f"setup.{name}",
                value=given[name],
            )
        else:
            values[name] = given[name]
    strategy = OmegaConf.select(config, f"{_ACTOR}.strategy") or "unknown"
    objective = OmegaConf.select(config, f"{_ACTOR}.policy_loss.loss_mode") or "vanilla"
    bounded = OmegaConf.select(config, ETA) is not None
    adaptive = bounded and OmegaConf.select(config, TARGET) is not None
    strategy, objective = str(strategy), str(objective)
    unmet = find_unmet(list_requirements("R3"), partial(OmegaConf.select, config), "", ())
    replays = replays_on_fsdp(live_path(config)) and not list(unmet)
    return Setup(
        **values,
        strategy=strategy,
        objective=objective,
        bounded=bounded,
        adaptive=adaptive,
        fsdp_replay=replays,
        program=find_program_mode(config),
        resumes=bool(OmegaConf.select(config, "async_training.partial_rollout", default=True)),
    )


def refuse_setup(config: DictConfig) -> None:
    """Refuse keys under ``setup`` beside corrections chosen by name, which do not read them.

    Raises:
        SpecError: a key of it is set.
    """
    for name, value in _read_given(config).items():
        if value is not None:
            key = f"setup.{name}"
            fix = f"Set correction=auto, or {key}=null."
            raise SpecError("only correction=auto reads it.", fix, key=key, value=value)


@dataclass(frozen=True)
class _Observed:
    """A value that the configuration shows, and its source; not ``firm`` where the user may know better."""

    value: Any
    source: str
    firm: bool = True


def _read_given(config: DictConfig) -> dict[str, Any]:
    node = config.get("setup")
    given: Any = {} if node is None else node
    if OmegaConf.is_config(node):
        given = OmegaConf.to_container(node, resolve=True)
    if not isinstance(given, Mapping):
        raise SpecError(f"expected the keys {', '.join(_LOOKS)}.", key="setup", value=given, mend={"setup": {}})
    for name, value in given.items():
        key = f"setup.{name}"
        if name not in _LOOKS:
            near = find_closest(str(name), _LOOKS)
            fix = f"Did you mean setup.{near}?" if near else f"Known under setup: {', '.join(_LOOKS)}."
            meant, away = ({f"setup.{near}": value}, {key: value}) if near else (None, None)
            raise SpecError("unknown key.", fix, key=key, value=value, meant=meant, removed=away)
        if value is None:
            continue
        if name in _CHOICES and value not in _CHOICES[name]:
            fix = f"Set one of {', '.join(_CHOICES[name])}, or null."
            choice = find_closest(str(value), _CHOICES[name])
            raise SpecError("no such choice.", fix, key=key, value=value, mend={key: choice} if choice else None)
        if name == "minibatches" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            fix = "Set 1 or more, or null to count them."
            raise SpecError("a number of gradient steps.", fix, key=key, value=value)
    return {name: given.get(name) for name in _LOOKS}


def _find_engine(config: DictConfig) -> _Observed | None:
    name = OmegaConf.select(config, f"{_ROLLOUT}.name")
    # Kernels can be matched until both engines agree to the bit, which the user knows and no key says.
    return _Observed("different", f"{_ROLLOUT}.name={name}", firm=False) if name in _ROLLOUT_ENGINES else None


def _find_mode(config: DictConfig) -> _Observed | None:
    if (program := find_program_mode(config)) is not None:
        return _Observed("async", f"the program is {program}_policy")
    if OmegaConf.select(config, "trainer") and not OmegaConf.select(config, "trainer.use_v1", default=False):
        return _Observed("sync", "the V0 trainer")
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
    return None if mode is None else _Observed("sync" if mode == "sync" else "async", f"trainer.v1.trainer_mode={mode}")


def _find_model(config: DictConfig) -> _Observed | None:
    for key in [*(f"{_ACTOR}.{strategy}.router_replay.mode" for strategy in REPLAYING), f"{ROUTER_REPLAY}.mode"]:
        if (mode := OmegaConf.select(config, key)) not in (None, "disabled"):
            return _Observed("moe", f"{key}={mode}")
    key = f"{_ROLLOUT}.enable_rollout_routing_replay"
    if OmegaConf.select(config, key):
        return _Observed("moe", f"{key}=true")
    experts = find_experts(config)
    return None if experts is None else _Observed("moe" if experts[0] else "dense", experts[1])


def _find_trajectory(config: DictConfig) -> _Observed | None:
    turns, loop = f"{_ROLLOUT}.multi_turn.enable", f"{_ROLLOUT}.agent.default_agent_loop"
    enabled, agent = OmegaConf.select(config, turns), OmegaConf.select(config, loop)
    if enabled:
        return _Observed("tools", f"{turns}=true")
    if agent not in (None, "single_turn_agent"):
        return _Observed("tools", f"{loop}={agent}", firm=False)
    # A data set may name an agent loop by row.
    return None if enabled is None else _Observed("single", f"{turns}=false", firm=False)


def _count_minibatches(config: DictConfig) -> _Observed | None:
    keys = ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.ppo_epochs")
    sizes = [count_prompts(config), *(OmegaConf.select(config, key) for key in keys[1:])]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    batch, mini_batch, epochs = sizes
    source = ", ".join(f"{key}={size}" for key, size in zip(keys, sizes, strict=True))
    return _Observed(math.ceil(batch / mini_batch) * epochs, source)


_LOOKS: dict[str, Callable[[DictConfig], _Observed | None]] = {
    "engine": _find_engine,
    "mode": _find_mode,
    "model": _find_model,
    "trajectory": _find_trajectory,
    "minibatches": _count_minibatches,
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "engine": get_args(Engine),
    "mode": get_args(Mode),
    "model": get_args(Model),
    "trajectory": get_args(Trajectory),
}
_WHY_UNKNOWN = {
    "engine": (f"{_ROLLOUT}.name is no engine that is known.", "Set setup.engine=different, or same."),
    "mode": ("trainer.v1.trainer_mode is not set.", "Set setup.mode=sync, or async."),
    "model": (
        "no config.json of the model is at hand to find out.",
        "Set setup.model=dense, or moe for a mixture of experts.",
    ),
    "trajectory": (f"{_ROLLOUT}.multi_turn.enable is not set.", "Set setup.trajectory=single, or tools."),
    "minibatches": (
        f"data.train_batch_size, {_ACTOR}.ppo_mini_batch_size and {_ACTOR}.ppo_epochs do not tell.",
        "Set setup.minibatches=1, or more.",
    ),
}
