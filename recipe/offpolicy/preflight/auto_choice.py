"""Implementation of ``correction=auto``: detect the run's set-up, select corrections for it, and give the reasons.

``select`` is the decision tree. ``check_requirements`` checks settings, such as routing replay, that a correction of
the loss cannot replace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from verl_patches.execution_path import FULLY_ASYNC, STRATEGY, count_prompts

from ..batch.declared_keys import Section, choice, count
from ..correction import Problem, SpecError, recommended
from ..correction.problem import CheckError, find_unmet, set_to
from ..replay.batch_routes import MEGATRON_ROUTER_REPLAY, RECORDED, ROUTER_REPLAY, list_requirements, replays_on_fsdp
from ..staleness.staleness_settings import CEILING, ETA, TARGET
from .composed import ACTOR, BATCH, LOSS_MODE, MINI_BATCH, MODE, NAME, PROXIMAL, ROLLOUT, UNTESTED_ENGINES, Composed
from .model_files import find_experts

Engine = Literal["same", "different"]
Mode = Literal["sync", "async"]
Model = Literal["dense", "moe"]
Trajectory = Literal["single", "tools"]

_NAMED = {"engine": Engine, "mode": Mode, "model": Model, "trajectory": Trajectory}
_KEYS = {name: choice(*get_args(options), null="to read it from the config") for name, options in _NAMED.items()}
_KEYS["minibatches"] = count("a number of gradient steps, 1 or more, or null to count them", null=True)
KEYS = Section("setup", dict.fromkeys(_KEYS), _KEYS)


@dataclass(frozen=True)
class Setup:
    """The properties of a run that make it off-policy.

    Attributes:
        engine: whether rollouts come from the trainer's own engine.
        mode: whether rollouts overlap with training.
        model: ``moe`` for a mixture of experts.
        trajectory: ``tools`` if tool outputs occur between the model's own tokens.
        minibatches: gradient steps per batch: global batch size divided by mini-batch size, times epochs.
        strategy: verl's name for the training backend; not every backend can replay routes.
        objective: verl's name for the base loss; GSPO is used instead of routing replay.
        bounded: whether ``offpolicy.staleness.eta`` limits staleness.
        adaptive: whether the staleness limit moves, up to a ceiling.
        program: the verl program if it is asynchronous by design (fully_async or one_step_off); None for main_ppo.
        resumes: whether fully_async resumes requests that a weight synchronisation interrupted.
        fsdp_replay: whether routes can be replayed on FSDP in this configuration.
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
        """Key that controls routing replay; None if routes cannot be replayed."""
        if self.strategy == "megatron":
            return f"{MEGATRON_ROUTER_REPLAY}.mode"
        return f"{ROUTER_REPLAY}.mode" if self.fsdp_replay else None


def read_setup(run: Composed) -> Setup:
    """Read the run's set-up from ``setup.*`` where these keys are set, and otherwise from verl's keys.

    Raises:
        CheckError: unknown keys or values.
        SpecError: a value is neither set nor implied by the configuration, or a set value contradicts it.
    """
    given, values = _read_given(run), dict[str, Any]()
    for name, (look, reason, fix) in _LOOKS.items():
        key, seen, value = f"setup.{name}", look(run), given[name]
        if value is None and seen is None:
            raise SpecError(f"correction=auto needs this value, but {reason}", fix, key=key)
        if value is not None and seen is not None and seen.firm and seen.value != value:
            fix = f"Set {key}=null to use the value that the configuration implies, or change the configuration."
            raise SpecError(f"the configuration implies {seen.value}: {seen.source}.", fix, key=key, value=value)
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
    """Reject keys under ``setup`` if corrections are chosen by name, because only ``correction=auto`` reads them.

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
    """A value implied by the configuration, and its source; ``firm`` is False if the user may set another value."""

    value: Any
    source: str
    firm: bool = True


_TURNS = f"{ROLLOUT}.multi_turn.enable"


def _find_engine(run: Composed) -> _Observed | None:
    name = run.get(NAME)
    # Kernels can be matched until the two engines are bitwise identical; no key shows whether this was done, so only
    # the user knows.
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
    loop = f"{ROLLOUT}.agent.default_agent_loop"
    enabled, agent = run.get(_TURNS), run.get(loop)
    if enabled:
        return _Observed("tools", f"{_TURNS}=true")
    if agent not in (None, "single_turn_agent"):
        return _Observed("tools", f"{loop}={agent}", firm=False)
    # A data set may name an agent loop for each row.
    return None if enabled is None else _Observed("single", f"{_TURNS}=false", firm=False)


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
    "model": (_find_model, "the model's config.json is not on this machine.", "Set setup.model=dense, or moe."),
    "trajectory": (
        _find_trajectory,
        f"{ROLLOUT}.multi_turn.enable is not set.",
        "Set setup.trajectory=single, or tools.",
    ),
    "minibatches": (_count_minibatches, "the batch sizes do not determine it.", "Set setup.minibatches=1, or more."),
}
"""Maps each key to a function that finds its value, and to the reason and fix reported if it finds none."""


ETA_CODE, ETA_MATHS = 4, 8  # steps of staleness; AReaL, arXiv:2505.24298. Nothing here was measured beyond 8.
_STALENESS = "trainer.v1.sampler.max_off_policy_threshold"
_FULLY_ASYNC = "async_training.staleness_threshold"
_PARTIAL = "async_training.partial_rollout"


@dataclass(frozen=True)
class Requirement:
    """A condition on one of verl's keys; the selected corrections are valid only if it is met.

    Attributes:
        key: Hydra path.
        value: the required value, or the largest allowed number.
        why: the reason, as a sentence.
        at_most: whether ``value`` is an upper bound.
        instead: another key and its value that make the requirement unnecessary.
    """

    key: str
    value: Any
    why: str
    at_most: bool = False
    instead: tuple[str, Any] | None = None


@dataclass
class Selection:
    """The corrections that a set-up needs, with reasons, requirements and advice.

    Attributes:
        options: the chosen options of the group ``correction``.
        reasons: one line per decision, with the property of the set-up on which the decision is based.
        requires: requirements on keys outside the correction.
        advice: changes that may help but are not required.
        values: values for keys that the options leave open; the user's own values take precedence.
    """

    options: tuple[str, ...] = ("none",)
    reasons: list[str] = field(default_factory=list)
    requires: list[Requirement] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    values: Mapping[str, float] = field(default_factory=dict)


def select(setup: Setup) -> Selection:
    """Select corrections by engine, mode, mini-batches, model and trajectory.

    For asynchronous data, the selection consists of the options in ``correction.recommended``, because OPSM on pi / mu
    covers the engine mismatch and staleness together, and does not need pi_old under the weights used for sampling.
    """
    chosen = Selection()
    _choose_correction(setup, chosen)
    if setup.mode == "async":
        _choose_rate_limit(setup, chosen)
    why = "each batch gets one gradient step, so the policy does not drift within a batch."
    if setup.minibatches > 1:
        why = "the clip of the base loss handles drift within a batch."
    chosen.reasons.append(f"setup.minibatches={setup.minibatches}: {why}")
    _choose_routing(setup, chosen)
    why = "only the model's own tokens."
    if setup.trajectory == "tools":
        why = "loss, ratios and counts exclude tool tokens, and post-tool tokens are logged separately."
        advice = "Tool outputs make ratios volatile: tis_turn and gsm_turn act per turn, so no turn affects another."
        chosen.advice.append(advice)
    chosen.reasons.append(f"setup.trajectory={setup.trajectory}: {why}")
    return chosen


def _choose_correction(setup: Setup, chosen: Selection) -> None:
    engine, mode = f"setup.engine={setup.engine}", f"setup.mode={setup.mode}"
    differs = setup.engine == "different"
    if setup.mode == "async":
        seen = "the engine mismatch and staleness" if differs else "only staleness"
        why = f"{mode}: opsm with delta={recommended.DELTA:g} drops stale rows with A < 0: {recommended.WHY}"
        if setup.adaptive:
            why = f"{why}; decoupled_ppo supplies the weight that {TARGET} needs"
        chosen.options = recommended.WEIGHTED_OPTIONS if setup.adaptive else recommended.OPTIONS
        chosen.reasons += [f"{engine}: pi / mu reflects {seen}.", f"{why}."]
        chosen.values = recommended.VALUES
        return
    why = "no weight, because mu equals pi_old."
    if differs:
        why = "tis_token, because mu and pi_old differ even if engine and trainer have the same model weights."
        chosen.options = ("tis_token",)
        chosen.advice.append(f"{recommended.BATCH_INVARIANT}.")
    elif setup.minibatches > 1:
        chosen.advice.append(
            "correction.proximal=same_engine skips the second forward pass once the first step has shown that mu and "
            "pi_old agree to 1e-6."
        )
    chosen.reasons += [f"{engine}: {why}", f"{mode}: no staleness correction."]


def _choose_rate_limit(setup: Setup, chosen: Selection) -> None:
    why = f"the correction was tested with at most {ETA_MATHS} steps of staleness, as AReaL was on maths"
    if setup.bounded:
        chosen.reasons.append(f"setup.mode=async: staleness is bounded by {ETA}.")
        chosen.requires.append(Requirement(ETA, ETA_MATHS, f"{why}.", at_most=True))
        if setup.adaptive:
            chosen.requires.append(Requirement(CEILING, ETA_MATHS, f"{why}.", at_most=True))
        chosen.advice.append(f"set {ETA} to at most {ETA_CODE} for code, {ETA_MATHS} for maths.")
    elif setup.program == FULLY_ASYNC:
        chosen.reasons += [
            f"setup.mode=async: staleness is limited to {_FULLY_ASYNC} + 1 versions unless a response takes longer "
            f"than the time between two weight synchronisations.",
            f"{_PARTIAL}={str(setup.resumes).lower()}: the tokens of a row were sampled by one version"
            f"{' or several' if setup.resumes else ''}, each with its own mu.",
        ]
        chosen.requires.append(Requirement(_FULLY_ASYNC, ETA_MATHS - 1, f"{why}.", at_most=True))
        chosen.advice.append(f"set {_FULLY_ASYNC} to at most {ETA_CODE - 1} for code, {ETA_MATHS - 1} for maths.")
    elif setup.program is not None:
        chosen.reasons.append("setup.mode=async: rollouts lag one step behind the trainer.")
    else:
        why = f"{why}; verl counts the versions that a trajectory spans, which is one more than its staleness."
        chosen.reasons.append(f"setup.mode=async: staleness is bounded by {_STALENESS}.")
        chosen.requires.append(Requirement(_STALENESS, ETA_MATHS + 1, why, at_most=True))
        chosen.advice.append(
            f"set {_STALENESS}={ETA_CODE + 1} for code, {ETA_MATHS + 1} for maths: {ETA_CODE} and {ETA_MATHS} steps."
        )


_REPLAY = {
    "disabled": "no routing replay, because nothing drifts within one gradient step and replay would only add bias",
    "R2": "R2, which replays the trainer's routes; the first mini-batch keeps its own",
    "R3": "R3, which replays the rollout engine's routes; with 3 mini-batches or more, engine mismatch dominates",
}


def _choose_routing(setup: Setup, chosen: Selection) -> None:
    if setup.model == "dense":
        chosen.reasons.append("setup.model=dense: a dense model has no routes to replay.")
        return
    replay = "disabled" if setup.minibatches == 1 else "R2" if setup.minibatches == 2 else "R3"
    on, fresh = replay != "disabled", setup.mode == "sync"  # gsm rejects stale rows
    if setup.objective == "gspo" and on:
        chosen.reasons.append(f"setup.model=moe: {LOSS_MODE}=gspo makes routing replay {replay} unnecessary.")
        return
    unavailable = on and setup.replay_mode is None
    line = f"setup.model=moe with setup.minibatches={setup.minibatches}: {_REPLAY[replay]}"
    if unavailable:
        line = f"{line}; routing replay is unavailable with {ACTOR}.strategy={setup.strategy} here"
        mask = "mask rows by their geometric mean, correction=[...,gsm], or " if fresh else ""
        chosen.advice.append(
            f"Without routing replay: {mask}use GSPO, {LOSS_MODE}=gspo. Megatron can replay routes, and so can FSDP "
            f"with verl 0.9.1's V1 trainer and vLLM."
        )
    elif fresh:
        chosen.advice.append(
            "Long responses or a mixture of experts: try a geometric mask, correction=[...,gsm], with wider bounds."
        )
    chosen.reasons.append(f"{line}.")
    if setup.replay_mode is None:
        return
    gspo = (LOSS_MODE, "gspo") if on else None
    chosen.requires.append(Requirement(setup.replay_mode, replay, f"{_REPLAY[replay]}.", instead=gspo))
    if replay == "R3":
        why = "R3 replays routes that the rollout engine must record."
        chosen.requires.append(Requirement(RECORDED, True, why, instead=gspo))
    if replay == "R2":
        why = "R2 records routes in the forward pass that computes pi_old."
        chosen.requires.append(Requirement(PROXIMAL, "recompute", why, instead=gspo))


def check_requirements(run: Composed, requires: Iterable[Requirement]) -> None:
    """Check a configuration against the requirements of a selection.

    Raises:
        CheckError: keys differ from the requirements; the message lists all of them, with their fixes.
    """
    if problems := [problem for one in requires if (problem := _check_requirement(run, one))]:
        raise CheckError(problems)


def _check_requirement(run: Composed, one: Requirement) -> Problem | None:
    if one.instead is not None and run.get(one.instead[0]) == one.instead[1]:
        return None
    value = run.get(one.key)
    # If verl's configuration lacks the keys of routing replay, replay is off.
    met = value == one.value or (value is None and one.value == "disabled")
    if one.at_most:
        met = isinstance(value, int | float) and value <= one.value
    if met:
        return None
    other = "" if one.instead is None else f", or {one.instead[0]}={one.instead[1]}"
    fix = f"Set {set_to(one.key, one.value)}{other}, or choose corrections by name instead of correction=auto."
    # Some releases do not have the key.
    return run.problem(one.key, one.why, fix, (set_to(one.key, one.value, add=run.get(one.key, ...) is ...),))


def format_selection(selection: Selection) -> Iterator[str]:
    """Format the lines that are printed about a selection at start-up."""
    values = "".join(f" {set_to(key, value)}" for key, value in selection.values.items())
    yield f"correction=auto selects correction=[{','.join(selection.options)}]{values}:"
    yield from (f"  {reason}" for reason in selection.reasons)
    yield from (f"  advice: {line}" for line in selection.advice)
