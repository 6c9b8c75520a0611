"""Resolution and checks of the corrections that alarms fall back to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from ..correction import CorrectionSpec, Problem, SpecError
from ..correction.problem import CheckError, format_value
from ..correction.support import KEYS as SUPPORT_KEYS
from ..monitor.alarms.alarm_settings import DEFAULTS, SECTION
from .hydra_groups import AUTO, EMPTY, check_stack, load_option, refuse_moved

_OF_ROLLOUT = ("allow_truncated_sampling", *SUPPORT_KEYS)


def resolve(config: DictConfig) -> None:
    """Replace names of options under ``fallback`` by their values, in place; needs the Hydra application.

    An option means what its file says: overrides of ``correction.*`` are of the configured correction alone.

    Raises:
        SpecError: a name that is no option, options that cannot be stacked, or one that leaves a value open.
    """
    for name in DEFAULTS:
        key = f"{SECTION}.{name}.fallback"
        names = OmegaConf.select(config, key)
        if not names or isinstance(names, DictConfig):
            continue
        options = _read_names(key, names)
        # What is about the rollout holds for every correction of it.
        given = {each: OmegaConf.select(config, f"correction.{each}") for each in _OF_ROLLOUT}
        correction = _stack(key, options) | {each: value for each, value in given.items() if value is not None}
        with open_dict(config):
            config.offpolicy.alarms[name].fallback = {"options": options, "correction": correction}


def check(config: DictConfig, spec: CorrectionSpec, run_checks: Callable[[DictConfig], Any]) -> None:
    """Check each fallback of a resolved configuration as if it were the configured correction.

    Args:
        spec: the configured correction.
        run_checks: of a whole configuration, with the fallback in the place of ``correction``.

    Raises:
        SpecError: a fallback that the run could not go over to.
        CheckError: of ``run_checks``, with the fallback that it is about.
    """
    for name in DEFAULTS:
        resolved = OmegaConf.select(config, f"{SECTION}.{name}.fallback")
        if not isinstance(resolved, DictConfig):
            continue
        key, options = f"{SECTION}.{name}.fallback", list(resolved.options)
        correction: Any = OmegaConf.to_container(resolved.correction, resolve=True)
        fallback = CorrectionSpec.from_mapping(correction)
        _check_can_follow(key, options, spec, fallback)
        try:
            run_checks(_substitute(config, fallback))
        except CheckError as error:
            raise CheckError(_reword_for_run(problem, key, options) for problem in error.problems) from error


def _reword_for_run(problem: Problem, key: str, options: list[str]) -> Problem:
    """Reword a fallback's problem for the run, and drop overrides of ``correction``, which is the configured one."""
    reason = f"{key}={format_value(options)} would stop the run, were it configured: {problem.reason}"
    overrides = tuple(each for each in problem.overrides if not each.lstrip("+~").startswith("correction."))
    return replace(problem, reason=reason, fix=problem.advice, overrides=overrides, parts=())


def _read_names(key: str, names: Any) -> list[str]:
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, ListConfig | list) or not all(isinstance(name, str) for name in listed):
        mend = {key: ["tis_token", "gsm"]}
        raise SpecError("expected names of corrections.", key=key, value=names, mend=mend)
    refuse_moved(key, listed)
    if empty := sorted(EMPTY.union([AUTO]) & set(listed)):
        reason, fix = f"{empty[0]} is no safer correction.", "Name one, such as tis_token."
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
            fix = "Name an option that sets it, of your own in a folder that hydra.searchpath names."
        raise SpecError(error.problem.statement, fix, key=key, value=options) from error


def _check_can_follow(key: str, options: list[str], spec: CorrectionSpec, fallback: CorrectionSpec) -> None:
    if fallback == spec:
        raise SpecError("the correction that is configured.", "Name another one.", key=key, value=options)
    if (fallback.proximal, fallback.alpha) != (spec.proximal, spec.alpha):
        raise SpecError(
            f"its correction.proximal={fallback.proximal} is not the run's, {spec.proximal}, and the forward passes of "
            f"a step cannot change while it runs.",
            f"Name a fallback with proximal={spec.proximal}.",
            key=key,
            value=options,
        )


def _substitute(config: DictConfig, fallback: CorrectionSpec) -> DictConfig:
    """Build the configuration of a run that had been started with the fallback."""
    changed: DictConfig = OmegaConf.create(OmegaConf.to_container(config, resolve=False))  # type: ignore[assignment]
    with open_dict(changed):
        changed.correction = fallback.to_mapping()
        # Alarms and the calibration of bounds are checked with the configured correction.
        for name in DEFAULTS:
            changed.offpolicy.alarms[name] = {"action": "off"}
        changed.offpolicy.calibrate = {}
    return changed
