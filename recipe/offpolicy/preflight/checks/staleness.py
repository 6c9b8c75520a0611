"""Checks of the keys under ``offpolicy``, of extensions, and of parts that depend on the age of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from omegaconf import OmegaConf

from verl_patches.execution_path import FULLY_ASYNC, USE_V1, describe_mode

from ...batch.declared_keys import build_unknown, read_shipped_defaults
from ...batch.plan import PROVE_EVERY
from ...correction import MaskSpec, WeightSpec, recommended
from ...correction.correction_parts import BY_AGE
from ...correction.problem import Problem, find_closest, format_value, remove, set_to
from ...delivery.checksums import find_problems as delivery_problems
from ...extensions.add_on import find_problems as extension_problems
from ...fault_tolerance.watchdog import find_problems as watchdog_problems
from ...monitor.alarm_settings import find_problems as alarm_problems
from ...monitor.bound_settings import find_problems as calibrate_problems
from ...recording.run import find_problems as record_problems
from ...recording.run import find_too_many_parts
from ...replay.batch_routes import find_problems as replay_problems
from ...staleness.staleness_settings import ETA, TARGET
from ...staleness.staleness_settings import find_problems as staleness_problems
from ...staleness.weight_snapshots import find_problems as snapshot_problems
from ..composed import ASYNC_MODES, MODE, MU_KEY, SHADOW, Composed
from .correction import list_masks

Validator = Callable[[Composed], Iterable[Problem]]


def _check_flag(name: str, run: Composed) -> Iterator[Problem]:
    key = f"offpolicy.{name}"
    if not isinstance(run.get(key), bool):
        yield run.problem(key, "not a truth value.", "Set true or false.", {key: False}, ())


def _check_prove_every(run: Composed) -> Iterator[Problem]:
    value = run.get(PROVE_EVERY)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        fix = "Set a number of updates, such as 50, or 0 for only the first update."
        yield run.problem(PROVE_EVERY, "not a whole number >= 0.", fix, {PROVE_EVERY: 50}, ())


_FLAGS = ("allow_identical_log_probs", "allow_unrelated_log_probs", "resume_changed_correction")
OWN_KEYS: dict[str, Validator] = {
    **{name: partial(_check_flag, name) for name in _FLAGS},
    "alarms": lambda run: alarm_problems(run.config, run.spec),
    "calibrate": lambda run: calibrate_problems(run.config, run.spec),
    "delivery": lambda run: delivery_problems(run.config),
    "extensions": lambda run: (),  # checked even if no extension of the user's is registered
    "late_weights": lambda run: snapshot_problems(run.config),
    "prove_every": _check_prove_every,
    "record": lambda run: [*record_problems(run.config), *find_too_many_parts(run.config, run.spec)],
    "replay": lambda run: replay_problems(run.config),
    "staleness": lambda run: staleness_problems(run.config),
    "watchdog": lambda run: watchdog_problems(run.config, [each.phase or each.section for each in run.extensions]),
    **dict.fromkeys(("shadow", "shadow_delta"), lambda run: ()),  # their reader validates them
}
"""Maps every key under ``offpolicy`` to the check of its value; shipped values are not checked."""


def check_own_keys(run: Composed) -> Iterator[Problem]:
    """Reject unknown keys under ``offpolicy``, and invalid values."""
    section = run.config.get("offpolicy")
    if section is None:
        fix = "Remove this override, or add the section with an option such as +correction@correction=NAME."
        yield run.problem("offpolicy", "the section is null or missing, so its keys have no values.", fix, (), ())
        return
    values: Any = OmegaConf.to_container(section)
    yield from (_build_unknown(name, values) for name in values if name not in OWN_KEYS)
    for name, validate in OWN_KEYS.items():
        # True is not 1 here.
        if name not in values or repr(values[name]) != repr(read_shipped_defaults(name)):
            yield from validate(run)
    yield from extension_problems(run.config)


def _build_unknown(name: str, values: dict[str, Any]) -> Problem:
    """Build the problem for an unknown key, with the most similar key of ours, if any."""
    from ..own_keys import find_meant, list_groups  # which finds modules by this package

    key, value = f"offpolicy.{name}", values[name]
    near = find_closest(name, OWN_KEYS)
    meant = ("offpolicy", near) if near else find_meant((name,))
    if meant is None:
        return build_unknown(key, value, f"Known under offpolicy: {', '.join(OWN_KEYS)}.")
    path, plain = ".".join(meant), not isinstance(value, dict)
    if plain and meant[0] in list_groups():  # a second option of a group would be rejected
        return build_unknown(key, value, f"Write {path}={format_value(value)} instead.")
    fits = plain and value is not None and not isinstance(values.get(meant[-1]), dict)
    moved = (*remove(key, value), set_to(path, value)) if fits else ()
    return build_unknown(key, value, f"Did you mean {path}?", *moved)


def warn_extensions(run: Composed) -> Iterator[Problem]:
    """Warn about extension settings that are probably unintended."""
    for extension in run.extensions:
        yield from (problem for problem in extension.problems(run.config) if problem.verdict != "ERROR")


def check_extensions(run: Composed) -> Iterator[Problem]:
    """Check each enabled extension, and that all enabled extensions can be combined."""
    for extension in run.extensions:
        yield from (problem for problem in extension.problems(run.config) if problem.verdict == "ERROR")
    first, *others = [each.section for each in run.extensions if each.replaces_estimator] or [""]
    for section in others:
        reason = f"this extension computes advantages instead of verl's estimator, and so does {first}."
        yield run.problem(section, reason, f"Set {section}=null, or {first}=null.", (), (section,), value="on")
    needy = tuple(each.section for each in run.extensions if each.worker() is not None)
    if needy and not run.get(MU_KEY):
        reason = f"{needy[0]} changes the loss, for which the workers need the rollout's log-probs."
        yield run.problem(MU_KEY, reason, f"Set {MU_KEY}=true.", {MU_KEY: True}, needy, value=False)


SAMPLER = "trainer.v1.sampler"
_THRESHOLD, _STRATEGY = f"{SAMPLER}.max_off_policy_threshold", f"{SAMPLER}.max_off_policy_strategy"
REPLACED = {"num_warmup_batches": 1, _THRESHOLD: 8, _STRATEGY: "drop"}
"""verl's keys that eta replaces (the first is in the mode's section), and their defaults, which count as not set."""
_SKIP = "skip.rollout_tq.enable"
_ALPHA = "correction.alpha"
STALE_NATS = 0.2
"""Minimum of a stale row's mean |log pi_old / mu|: in the recorded run
``tests/data/faults/held_out/colocate_async-14``, 95 % of the tokens in stale rows belong to rows above this value."""
_NOTES_AGES = "Use verl 0.9.1 with trainer.use_v1=true"


def check_staleness(run: Composed) -> Iterator[Problem]:
    """Check that eta's requirements are met, and that none of the keys that eta replaces is set."""
    settings, off = run.staleness, f"or {ETA}=null."
    if settings is None:
        return
    if uncovered := list(_find_uncovered(run)):
        yield from uncovered
        return
    if settings.adapt is not None and not run.spec.all_weights:
        reason = "this target concerns the effective sample size of the weights, but the correction has no weight."
        fix = f"Add a weight, {recommended.WEIGHTED_LINE} for example, or set {TARGET}=null."
        yield run.problem(TARGET, reason, fix, (), (), alongside=(ETA,), value=settings.adapt.ess)
    for name, usual in REPLACED.items():
        key = name if "." in name else f"trainer.v1.{run.config.trainer.v1.trainer_mode}.{name}"
        if run.get(key) not in (None, usual):
            fix = f"Set {set_to(key, usual)}, {off}"
            yield run.problem(key, f"{ETA} replaces it, so it is not read.", fix, (), (), alongside=(ETA,))
    path, name = (f"{SAMPLER}.custom_sampler.{each}" for each in ("path", "name"))
    if run.get(path) and run.get(name):
        reason = "the staleness limit uses its own replay buffer, so this buffer would not be built."
        yield run.problem(name, reason, f"Set it to null, {off}", (), (), alongside=(ETA,))
    if run.get(_SKIP):
        reason = "verl then replays recorded rollouts in whole batches, which bypasses the staleness limit."
        yield run.problem(_SKIP, reason, f"Set it to false, {off}", (), (), alongside=(ETA,), value=True)


def _find_uncovered(run: Composed) -> Iterator[Problem]:
    """Find out why the trainer would not issue prompts according to the limit."""
    path, off = run.path, f"{ETA}=null"
    alongside = MODE if path.trainer == "v1" else USE_V1
    if not path.attributes.staleness_limit:
        reason = f"verl {path.release} does not issue prompts as the limit requires; 0.9.1 does."
        fix = f"Install verl 0.9.1, or set {off}."
    elif path.mode == FULLY_ASYNC:
        reason = "fully_async_policy issues prompts by its own limit, async_training.staleness_threshold."
        fix = f"Set {off}, and the limit there."
    elif path.asynchronous and path.trainer == "v0":
        reason, fix = f"{path.mode}_policy trains each batch one step late.", f"Set {off}."
    elif path.trainer != "v1" or run.config.trainer.v1.trainer_mode not in ASYNC_MODES:
        who = "it" if path.trainer == "v1" else "the V0 trainer"
        fix = f"Set {off}, or {USE_V1}=true and {MODE} to one of {', '.join(ASYNC_MODES)}."
        shown = {alongside: run.get(MODE) if path.trainer == "v1" else False}
        yield run.problem(ETA, f"{who} samples each batch with the current weights.", fix, (), (), alongside=shown)
        return
    else:
        return
    yield run.problem(ETA, reason, fix, (), ())


def warn_verls_limit(run: Composed) -> Iterator[Problem]:
    """Warn about verl's own staleness keys if they do not bound the age or if they discard sequences.

    With W warm-up batches and no stragglers, verl trains groups W versions after they were issued, but counts W + 1.
    """
    if not run.asynchronous or run.staleness is not None or run.program is not None:
        return
    warmup = f"trainer.v1.{run.config.trainer.v1.trainer_mode}.num_warmup_batches"
    ahead, threshold, strategy = run.get(warmup), run.get(_THRESHOLD), run.get(_STRATEGY)
    if not isinstance(ahead, int | float):
        return
    age = math.ceil(ahead)
    if threshold is None:
        reason = f"the age is not limited: groups are trained {age} or more versions after they were issued."
        fix = f"Set {ETA}={format_value(ahead)} to bound it."
        yield run.problem(_THRESHOLD, reason, fix, (), (), "NOTE", (warmup,))
    elif age + 1 > threshold and strategy in ("wait", "drop"):
        fix = f"Set {set_to(warmup, threshold - 1)}, or {ETA}={threshold - 1} instead of all three."
        reason = (
            f"it discards {1 - threshold / (age + 1):.0%} of all rollouts, because groups arrive {age} versions after "
            f"they were issued."
        )
        if strategy == "wait":
            reason = f"it waits only for unfinished groups: finished groups are trained at age {age}, and the "
            reason += f"threshold admits {threshold - 1}."
        sets, alongside = {warmup: threshold - 1}, (warmup, _THRESHOLD)
        yield run.problem(_STRATEGY, reason, fix, sets, (), "NO-OP" if strategy == "wait" else "NOTE", alongside)


def warn_asynchronous(run: Composed) -> Iterator[Problem]:
    """Warn if asynchronous training is uncorrected, or corrected only by a capped weight or by narrow bounds."""
    if not run.asynchronous:
        return
    key, mode = describe_mode(run.config)
    if run.spec.is_none and not run.active:
        reason = "sequences are sampled with older weights than those they train, and no correction is configured."
        fix = f"Add a correction, {recommended.LINE} for example: {recommended.WHY}."
        yield run.problem(key, reason, fix, (), (), "NOTE", value=mode)
    if run.get(ETA) == 0:
        return
    weight, alongside = run.spec.weight, {key: mode}
    token = weight is not None and (weight.kind, weight.level, weight.ratio) == ("truncate", "token", "rollout")
    if weight is not None and token and not run.spec.masks:
        reason = "a capped weight alone does not keep stale data from collapsing a run: with decoupled_ppo, 8 of 8 "
        fix, at = f"Use {recommended.LINE}: {recommended.WHY}.", "correction.weight.upper"
        yield run.problem(at, f"{reason}runs collapsed.", fix, (), ("weight",), "NOTE", alongside, value=weight.upper)
    for name, mask in list_masks(run):
        low, high = mask.limits
        of_stale = mask.entry.at(-STALE_NATS)
        whole = mask.when == "any" and mask.ratio != "ppo" and mask.entry.reduce == "mean" and mask.level != "token"
        if not whole or mask.by_staleness is not None or low <= of_stale <= high:
            continue
        side = "lower" if of_stale < low else "upper"
        reason = (
            f"it rejects rows sampled with older weights: in a recorded run, [0.99, 1.01] kept 0.898 of the tokens in "
            f"fresh rows but 0.005 in rows whose mean log-ratio is beyond {STALE_NATS:g} nats."
        )
        fix = f"Use {recommended.LINE} instead, or calibrate the bound on a recording of such rows."
        value = getattr(mask, side)
        yield run.problem(f"correction.{name}.{side}", reason, fix, (), (name,), "NOTE", alongside, value=value)


def check_ages(run: Composed) -> Iterator[Problem]:
    """Check that verl records the weight versions that masks on age and ``by_staleness`` read."""

    def explain(part: WeightSpec | MaskSpec) -> str | None:
        return run.unknown_age if part.level != "sequence" or run.unknown_versions else None

    for key, part in run.spec.age_parts.items():
        if (reason := explain(part)) is None:
            continue
        at = f"correction.{key}"
        if part.by_staleness is not None:
            fix, factors = f"{_NOTES_AGES}, or set {at}.by_staleness=null.", list(part.by_staleness)
            yield run.problem(f"{at}.by_staleness", reason, fix, (), (key,), value=factors)
        elif run.unknown_versions is None:
            sets = {f"{at}.level": "sequence"}
            yield run.problem(f"{at}.level", reason, "", sets, (key,), value=part.level)
        else:
            fix = f"{_NOTES_AGES}, or remove {at}."
            yield run.problem(f"{at}.aggregate", reason, fix, (), (key,), value=part.aggregate)
    if run.spec.alpha == BY_AGE and run.unknown_age is not None:
        fix = f"{_NOTES_AGES}, or set {_ALPHA}=0.5 for every age."
        yield run.problem(_ALPHA, run.unknown_age, fix, (), ("proximal",), value=BY_AGE)
    for name, shadow in run.shadows.items():
        if reason := next((said for part in shadow.age_parts.values() if (said := explain(part))), None):
            fix = f"{_NOTES_AGES}, or remove it from {SHADOW}."
            yield run.problem(SHADOW, f"it depends on age, and {reason}", fix, (), (f"shadow.{name}",), value=name)


def warn_ages(run: Composed) -> Iterator[Problem]:
    """Warn about age limits that no token exceeds, and age factors that change no bound."""
    settings = run.staleness if run.asynchronous else None
    oldest = settings.oldest_age if settings else None if run.asynchronous else 0
    why = f"{ETA} allows no older tokens" if settings else "synchronous training samples with the current weights"
    alongside = (ETA,) if settings else ()
    if run.spec.alpha == BY_AGE and oldest is not None and oldest <= 1:
        reason = f"no token is more than one version older than the current weights, because {why}, so pi_old is mu."
        fix = f"Set {_ALPHA}=0.5 for every age, or correction.proximal=bypass, which is the same here."
        yield run.problem(_ALPHA, reason, fix, (), ("proximal",), "NO-OP", alongside, value=BY_AGE)
    for key, part in run.spec.age_parts.items():
        at, parts = f"correction.{key}", (key,)
        if part.by_staleness is not None:
            ages = len(part.by_staleness) if oldest is None else oldest + 1
            if all(factor == 1 for factor in part.by_staleness[:ages]):
                reason, factors = "each age that occurs has the factor 1, which changes no bound.", f"{at}.by_staleness"
                fix, value = (
                    f"Set a factor above 1 for at least one age that occurs, or {factors}=null.",
                    list(part.by_staleness),
                )
                yield run.problem(factors, reason, fix, (), parts, "NO-OP", alongside, value=value)
        elif oldest is not None and part.upper is not None and part.upper >= oldest:
            reason = f"no token is older than {oldest} versions, because {why}, so the mask never acts."
            less = f"Set {at}.upper={oldest - 1}, which changes training" if oldest else "Train asynchronously"
            yield run.problem(
                f"{at}.upper", reason, f"{less}, or remove {at}.", (), parts, "NO-OP", alongside, value=part.upper
            )
