"""Resolves a composed configuration before the checks: makes ``auto`` choices, and replaces names with corrections."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from ..correction import CorrectionSpec, Problem, SpecError
from ..correction.correction_parts import SUPPORT_KEYS
from ..correction.problem import CheckError, format_value
from ..correction.validation import rename_for_metrics
from ..monitor.alarm_settings import DEFAULTS, SECTION
from ..recording.run import SECTION as RECORD
from ..recording.run import resolve_dir
from .auto_choice import KEYS, Requirement, check_requirements, format_selection, read_setup, refuse_setup, select
from .composed import AUTO as AUTO_PROXIMAL
from .composed import BYPASS, PROXIMAL, SHADOW, VERL, Composed, choose_proximal
from .hydra_groups import (
    AUTO,
    EMPTY,
    check_stack,
    load_option,
    read_chosen_options,
    read_task_overrides,
    recompose,
    refuse_moved,
)

Say = Callable[[str], None]
"""Receives a line that describes a choice and the reason for it."""
SHIPPED_DELTA = 0.1
"""Default of ``offpolicy.shadow_delta``, in nats per token."""
_DELTA, _MISSING = f"{SHADOW}_delta", "???"  # the latter is OmegaConf's placeholder for a mandatory value
_OF_ROLLOUT = ("allow_truncated_sampling", "centering", *SUPPORT_KEYS)


def resolve(run: Composed, say: Say) -> list[str]:
    """Resolve ``auto`` choices and names of corrections in place, inside the Hydra application that composed it.

    Returns:
        The options of the group ``correction``.

    Raises:
        SpecError: something cannot be resolved; the message names the key, its value and the fix.
        CheckError: an extension is not available, or its settings are malformed.
    """
    options = read_chosen_options()
    check_stack(options)
    requires: list[Requirement] = []
    if options == [AUTO]:
        selection = select(read_setup(run))
        options, requires = list(selection.options), selection.requires
        check_stack(options)
        with open_dict(run.config):
            run.config.correction = recompose(options, selection.values)
        for line in format_selection(selection):
            say(line)
    elif run.get("setup") != KEYS.shipped:
        refuse_setup(run)
    if not EMPTY.issuperset(options):
        _replace_bypass(run, say)
    for extension in run.extensions:
        for line in extension.configure(run.config):
            say(line)
    # The order matters, because proximal=auto depends on shadows and fallbacks, and the requirements depend on all
    # choices.
    _resolve_shadows(run, say)
    _resolve_fallbacks(run.config)
    if run.get(PROXIMAL) == AUTO_PROXIMAL:
        choice = choose_proximal(run)
        with open_dict(run.config):
            run.config.correction.proximal = choice.proximal
        if choice.said:
            say(choice.said)
    if requires:
        check_requirements(run, requires)
    if run.get(f"{RECORD}.dir") is not None:
        resolve_dir(run.config)
    return options


def refuse_emptied(spec: CorrectionSpec, options: Sequence[str]) -> None:
    """Reject a chosen correction if overrides have removed all of its parts.

    Raises:
        SpecError: nothing is left of the correction; the message names the options.
    """
    if spec.is_none and not EMPTY.issuperset(options):
        fix = "Set correction=none to train uncorrected."
        raise SpecError("overrides have removed all of its parts.", fix, key="correction", value=list(options))


def _replace_bypass(run: Composed, say: Say) -> None:
    """Replace ``bypass_mode`` in an asynchronous program's own configuration, because the correction defines pi_old."""
    key = f"{VERL}.{BYPASS}"
    given = any(each.lstrip("+").startswith(f"{key}=") for each in read_task_overrides())
    if run.program is None or run.get(key) is not True or given:
        return
    with open_dict(run.config):
        run.config.algorithm.rollout_correction.bypass_mode = False
    say(f"{key}=true of {run.program}_policy's own configuration is replaced, because {PROXIMAL} determines pi_old.")


def _resolve_shadows(run: Composed, say: Say) -> None:
    """Replace option names in ``offpolicy.shadow`` with the values of these options; needs the Hydra application."""
    names, delta = run.get(SHADOW, []), run.get(_DELTA, SHIPPED_DELTA)
    if not isinstance(names, str | ListConfig | list):
        fix = f"Set {SHADOW}=[gsm], or []."
        raise SpecError("expected names of corrections.", fix, key=SHADOW, value=names, proposed={SHADOW: []})
    named = [names] if isinstance(names, str) else list(names)
    refuse_moved(SHADOW, named)
    shadows, notes = parse_shadows(named, load_option, delta)
    if delta != SHIPPED_DELTA and not notes:
        reason = f"no option in {SHADOW} needs a delta from here, so this value is unused."
        raise SpecError(reason, key=_DELTA, value=delta, proposed={_DELTA: SHIPPED_DELTA})
    if shadows:
        with open_dict(run.config):
            run.config.offpolicy.shadow = {name: shadow.to_mapping() for name, shadow in shadows.items()}
    renamed = {name: label for name in shadows if (label := rename_for_metrics(name)) != name}
    notes += [f"shadow {name}: its metrics are offpolicy/shadow/{label}/*" for name, label in renamed.items()]
    for note in notes:
        say(note)


def parse_shadows(
    names: Iterable[str], values: Callable[[str], Mapping[str, Any]], default_delta: float
) -> tuple[dict[str, CorrectionSpec], list[str]]:
    """Parse the corrections to report on, which are given by the names of their options.

    Args:
        names: options of the group ``correction``.
        values: returns the plain values of an option; a mandatory value that the option leaves open is "???".
        default_delta: OPSM's delta in nats per token if the option leaves it open. Reports use this default, whereas a
            run must set delta.

    Returns:
        A mapping from name to correction, and a sentence for each delta that was filled in.

    Raises:
        SpecError: an option cannot be reported on, or has malformed values.
    """
    shadows: dict[str, CorrectionSpec] = {}
    notes: list[str] = []
    if isinstance(default_delta, bool) or not isinstance(default_delta, int | float) or not default_delta > 0:
        reason, proposed = "expected a number > 0, in nats per token.", {_DELTA: SHIPPED_DELTA}
        raise SpecError(reason, key=_DELTA, value=default_delta, proposed=proposed)
    names = list(names)
    for name in names:
        refuse = partial(_build_shadow_error, names, name)
        if not isinstance(name, str):
            raise refuse("not an option of the group correction.")
        if name in shadows:
            raise SpecError("named twice.", key=SHADOW, value=name, proposed={SHADOW: list(dict.fromkeys(names))})
        if not re.fullmatch(r"[a-z0-9_/]+", name):
            reason = "an option name contains only lower case letters, digits, _ and /."
            raise refuse(reason, f"Write several as a list, {SHADOW}=[gsm,opsm].")
        try:
            plain, filled = _fill_delta(values(name), default_delta)
            spec = CorrectionSpec.from_mapping(plain)
        except SpecError as error:
            raise refuse(error.problem.statement) from error
        if spec.proximal != "recompute":
            raise refuse(
                f"its correction.proximal={spec.proximal} changes pi_old, and thus the run itself, so it cannot be a "
                f"shadow of another correction."
            )
        if not spec.all_weights and not spec.masks:
            raise refuse("it has no weight and no mask to report on.")
        shadows[name] = spec
        notes += [
            f"shadow {name}: {key} is not set; the report uses {default_delta:g} nats per token" for key in filled
        ]
    return shadows, notes


def _build_shadow_error(names: Iterable[Any], name: Any, reason: str, fix: str = "") -> SpecError:
    """Build the error for a shadow; the proposed override removes this shadow from the list."""
    left = [other for other in dict.fromkeys(names) if other != name]
    return SpecError(reason, fix, key=SHADOW, value=name, proposed={SHADOW: left})


def check_beside(spec: CorrectionSpec, shadows: Mapping[str, CorrectionSpec]) -> None:
    """Check that shadows are well formed with the run's ``proximal``, because shadows read the run's pi_old.

    Raises:
        SpecError: a shadow is malformed with the run's ``proximal``.
    """
    for name, shadow in shadows.items():
        try:
            CorrectionSpec.from_mapping(shadow.to_mapping() | {"proximal": spec.proximal, "alpha": spec.alpha})
        except SpecError as error:
            raise _build_shadow_error(shadows, name, error.problem.statement) from error


def _fill_delta(plain: Mapping[str, Any], default_delta: float) -> tuple[dict[str, Any], list[str]]:
    """Fill in delta for each mask that leaves it open; return the values, and the keys that were filled in."""
    masks = plain.get("masks")
    if not isinstance(masks, Mapping):
        return dict(plain), []
    filled, open_keys = dict(masks), []
    for name, mask in masks.items():
        if isinstance(mask, Mapping) and mask.get("delta") == _MISSING:
            filled[name] = {**mask, "delta": default_delta}
            open_keys.append(f"correction.masks.{name}.delta")
    return {**plain, "masks": filled}, open_keys


def _resolve_fallbacks(config: DictConfig) -> None:
    """Replace option names under ``fallback`` with the options' values in place; needs the Hydra application.

    An option keeps the values in its file, because overrides of ``correction.*`` apply only to the configured
    correction.

    Raises:
        SpecError: a name is not an option, options cannot be stacked, or an option leaves a value open.
    """
    for name in DEFAULTS:
        key = f"{SECTION}.{name}.fallback"
        names = OmegaConf.select(config, key)
        if not names or isinstance(names, DictConfig):
            continue
        options = _read_names(key, names)
        # Settings of the rollout are the same for every correction.
        given = {each: OmegaConf.select(config, f"correction.{each}") for each in _OF_ROLLOUT}
        stacked = _stack(key, options)
        if stacked.get("centering") is not None and given["centering"] is None:
            raise SpecError(
                "the rollout engine returns its likeliest tokens only if the run requests them from the start.",
                "Set correction.centering, which then applies before the alarm too, or name another fallback.",
                key=key,
                value=options,
            )
        correction = stacked | {each: value for each, value in given.items() if value is not None}
        try:
            CorrectionSpec.from_mapping(correction)
        except SpecError as error:
            raise SpecError(error.problem.statement, "Name another one.", key=key, value=options) from error
        with open_dict(config):
            config.offpolicy.alarms[name].fallback = {"options": options, "correction": correction}


def check_fallbacks(run: Composed, run_checks: Callable[[Composed], Any]) -> None:
    """Check each fallback of a resolved configuration as if it were the configured correction.

    Args:
        run_checks: checks a whole configuration in which the fallback replaces ``correction``.

    Raises:
        SpecError: the run could not switch to a fallback.
        CheckError: raised by ``run_checks``; names the fallback concerned.
    """
    for name in DEFAULTS:
        resolved = run.get(f"{SECTION}.{name}.fallback")
        if not isinstance(resolved, DictConfig):
            continue
        key, options = f"{SECTION}.{name}.fallback", list(resolved.options)
        correction: Any = OmegaConf.to_container(resolved.correction, resolve=True)
        fallback = CorrectionSpec.from_mapping(correction)
        _check_can_follow(key, options, run.spec, fallback)
        try:
            run_checks(Composed(_substitute(run.config, fallback), fallback, own_main=run.own_main))
        except CheckError as error:
            raise CheckError(_reword_for_run(problem, key, options) for problem in error.problems) from error


def _reword_for_run(problem: Problem, key: str, options: list[str]) -> Problem:
    """Reword a fallback's problem for the run; drop overrides that would change the configured correction."""
    reason = f"{key}={format_value(options)} would stop the run if it were configured: {problem.reason}"
    overrides = tuple(each for each in problem.overrides if not each.lstrip("+~").startswith("correction."))
    return replace(problem, reason=reason, fix=problem.advice, overrides=overrides, parts=())


def _read_names(key: str, names: Any) -> list[str]:
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, ListConfig | list) or not all(isinstance(name, str) for name in listed):
        proposed = {key: ["tis_token", "gsm"]}
        raise SpecError("expected names of corrections.", key=key, value=names, proposed=proposed)
    refuse_moved(key, listed)
    if empty := sorted(EMPTY.union([AUTO]) & set(listed)):
        reason, fix = f"{empty[0]} is not a safer correction.", "Name one, such as tis_token."
        raise SpecError(reason, fix, key=key, value=list(listed))
    return list(listed)


def _stack(key: str, options: list[str]) -> dict[str, Any]:
    try:
        check_stack(options)
        merged = OmegaConf.merge(*(load_option(option) for option in options))
        return CorrectionSpec.from_mapping(OmegaConf.to_container(merged, resolve=True)).to_mapping()  # type: ignore[arg-type]
    except SpecError as error:
        fix = error.problem.advice
        if error.problem.value == "???":
            fix = "Use an option that sets it, from your own folder on hydra.searchpath."
        raise SpecError(error.problem.statement, fix, key=key, value=options) from error


def _check_can_follow(key: str, options: list[str], spec: CorrectionSpec, fallback: CorrectionSpec) -> None:
    if fallback == spec:
        raise SpecError("this correction is already configured.", "Name another one.", key=key, value=options)
    if (fallback.proximal, fallback.alpha) != (spec.proximal, spec.alpha):
        raise SpecError(
            f"its correction.proximal={fallback.proximal} differs from the run's, {spec.proximal}, and the forward "
            f"passes of a step cannot change during a run.",
            f"Name a fallback with proximal={spec.proximal}.",
            key=key,
            value=options,
        )


def _substitute(config: DictConfig, fallback: CorrectionSpec) -> DictConfig:
    """Build the configuration that a run started with the fallback would have."""
    changed: DictConfig = OmegaConf.create(OmegaConf.to_container(config, resolve=False))  # type: ignore[assignment]
    with open_dict(changed):
        changed.correction = fallback.to_mapping()
        # Alarms and the calibration of bounds are checked with the configured correction.
        for name in DEFAULTS:
            changed.offpolicy.alarms[name] = {"action": "off"}
        changed.offpolicy.calibrate = {}
    return changed
