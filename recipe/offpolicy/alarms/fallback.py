"""Safer corrections by name: what an alarm falls back to, resolved and checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from ..composition import AUTO, EMPTY, check_stack, option_values
from ..correction import CorrectionSpec, SpecError
from .settings import DEFAULTS, SECTION


def resolve(config: DictConfig) -> None:
    """Names of options under ``fallback`` replaced by what they mean, which only Hydra's application knows; in place.

    An option means what its file says: overrides of ``correction.*`` are of the configured correction alone.

    Raises:
        SpecError: a name that is no option, options that cannot be stacked, or one that leaves a value open.
    """
    for name in DEFAULTS:
        key = f"{SECTION}.{name}.fallback"
        names = OmegaConf.select(config, key)
        if not names or isinstance(names, DictConfig):
            continue
        options = _names(key, names)
        # What the user has said of the rollout holds for whatever corrects it.
        truncated = OmegaConf.select(config, "correction.allow_truncated_sampling", default=False)
        correction = _stacked(key, options) | {"allow_truncated_sampling": truncated}
        with open_dict(config):
            config.offpolicy.alarms[name].fallback = {"options": options, "correction": correction}


def check(config: DictConfig, spec: CorrectionSpec, run_checks: Callable[[DictConfig], Any]) -> None:
    """Hold each fallback of a resolved configuration to what is asked of a configured correction.

    Args:
        spec: the configured correction.
        run_checks: of a whole configuration, with the fallback in the place of ``correction``.

    Raises:
        SpecError: a fallback that the run could not go over to.
        CheckError: of ``run_checks``, as it is.
    """
    for name in DEFAULTS:
        resolved = OmegaConf.select(config, f"{SECTION}.{name}.fallback")
        if not isinstance(resolved, DictConfig):
            continue
        key = f"{SECTION}.{name}.fallback=[{','.join(resolved.options)}]"
        correction: Any = OmegaConf.to_container(resolved.correction, resolve=True)
        fallback = CorrectionSpec.from_mapping(correction)
        _can_follow(key, spec, fallback)
        try:
            run_checks(_in_place(config, fallback))
        except RuntimeError as error:
            # CheckError lies in a later layer; its problems stay as they are.
            error.args = (f"{key}, were it configured:\n{error}",)
            raise


def _names(key: str, names: Any) -> list[str]:
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, ListConfig | list) or not all(isinstance(name, str) for name in listed):
        raise SpecError(f"{key}={names}: expected names of corrections. Set {key}=[tis_token,gsm].")
    if empty := sorted(EMPTY.union([AUTO]) & set(listed)):
        raise SpecError(f"{key}=[{','.join(listed)}]: {empty[0]} is no safer correction. Name one, such as tis_token.")
    return list(listed)


def _stacked(key: str, options: list[str]) -> dict[str, Any]:
    try:
        check_stack(options)
        merged = OmegaConf.merge(*(option_values(option) for option in options))
        return CorrectionSpec.from_mapping(OmegaConf.to_container(merged, resolve=True)).to_mapping()  # type: ignore[arg-type]
    except SpecError as error:
        named = " Or write an option that sets it into a folder of yours, and name that by hydra.searchpath."
        hint = named if "is required and not set" in str(error) else ""
        raise SpecError(f"{key}=[{','.join(options)}]: {error}{hint}") from error


def _can_follow(key: str, spec: CorrectionSpec, fallback: CorrectionSpec) -> None:
    if fallback == spec:
        raise SpecError(f"{key}: the correction that is configured. Name another one.")
    if (fallback.proximal, fallback.alpha) != (spec.proximal, spec.alpha):
        raise SpecError(
            f"{key}: its correction.proximal={fallback.proximal} is not the run's, {spec.proximal}, and the forward "
            f"passes of a step cannot change while it runs. Name a fallback with proximal={spec.proximal}."
        )


def _in_place(config: DictConfig, fallback: CorrectionSpec) -> DictConfig:
    """The configuration of a run that had been started with the fallback."""
    changed: DictConfig = OmegaConf.create(OmegaConf.to_container(config, resolve=False))  # type: ignore[assignment]
    with open_dict(changed):
        changed.correction = fallback.to_mapping()
        # Alarms and the schedule of bounds were checked with the correction that they were configured for.
        for name in DEFAULTS:
            changed.offpolicy.alarms[name] = {"action": "off"}
        changed.offpolicy.calibrate.target_kept = None
        changed.offpolicy.calibrate.target_ess = None
    return changed
