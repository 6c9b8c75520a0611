"""Check for key names that verl no longer reads, or not on this path."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_patches.execution_path import LivePath

from ...correction import CorrectionSpec
from ...correction.problem import Problem, remove, set_to
from ...correction.spelling import find_closest
from .keys import ACTOR, DEFAULTS, VERL, get_value, name_part, read_rollout_correction

_TRAINER_MODE = "trainer.v1.trainer_mode"

OBSOLETE = {
    "rollout_is_threshold_lower": "rollout_is_threshold='lower_upper', a string, which verl >= 0.8 reads",
    "rollout_rs_threshold_lower": "rollout_rs_threshold='lower_upper', a string",
    "rollout_token_veto_threshold": "a mask of ours, such as correction=outlier",
    "use_policy_gradient": "loss_type=reinforce",
}
"""Names of verl 0.6 and 0.7.0 -> their equivalents."""

FORMER = {
    "algorithm.rollout_is": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_is_threshold": "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_is_threshold_lower": "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_is_level": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_is_mode": "algorithm.rollout_correction.rollout_is or rollout_rs",
    "algorithm.rollout_is_veto_threshold": "algorithm.rollout_correction.rollout_rs",
    f"{ACTOR}.tis_imp_ratio_cap": "algorithm.rollout_correction.rollout_is_threshold",
}
"""Keys of verl before 0.6 -> their successors."""


def check_trainer_mode(config: DictConfig, path: LivePath) -> Iterator[Problem]:
    """Check that ``trainer_mode`` meets the V1 trainer, which alone reads it."""
    mode = get_value(config, _TRAINER_MODE)
    if path.trainer == "v0" and mode not in (None, "sync"):
        reason, fix = f"this is {path}, which is synchronous and reads no mode.", "Set trainer.use_v1=true."
        override = set_to("trainer.use_v1", True, add=True)
        yield Problem(_TRAINER_MODE, mode, reason, fix, "NO-OP", (_TRAINER_MODE,), (override,))


def check_former_names(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Find former key names; each is reported as a correction of its own, as no other key asks for it."""
    reason = "verl no longer reads a key of this name."
    for key, value in read_rollout_correction(config).items() if spec.is_none else ():
        if key not in DEFAULTS and key != "_target_":
            name, instead, near = f"{VERL}.{key}", OBSOLETE.get(key), find_closest(key, DEFAULTS)
            fix, overrides = f"verl reads {', '.join(DEFAULTS)}.", remove(name, value)
            if instead:
                fix = f"In its place: {instead}."
            elif near:
                meant = set_to(f"{VERL}.{near}", value)
                fix, overrides = f"Did you mean {meant}?", (f"~{name}", meant)
            said = reason if instead else "verl reads no key of this name."
            yield Problem(name, value, said, fix, "NO-OP", (name_part(key),), overrides)
    for key, instead in FORMER.items():
        if (value := get_value(config, key)) is None:
            continue
        if spec.is_none:
            overrides, fix = _build_move(key, value, instead), f"In its place: {instead}."
        else:
            overrides, fix = _build_ours(key, value, spec)
        yield Problem(key, value, reason, fix, "NO-OP", (key,), overrides)


def _build_ours(key: str, value: object, spec: CorrectionSpec) -> tuple[tuple[str, ...], str]:
    """Build overrides and a sentence that say the same by the correction of ours that is on, which verl's would repeat.

    Nothing is moved where ours has no part that does it.
    """
    cap = key.endswith(("tis_imp_ratio_cap", "rollout_is_threshold")) and isinstance(value, int | float)
    if spec.weight is None:
        weight = "correction=[tis_token,...]"
        return (), f"Stack a weight of ours that does it, {weight}, and leave verl's key to launches of verl."
    if cap and spec.weight.upper is not None:
        return (f"~{key}", set_to("correction.weight.upper", value)), "Set correction.weight.upper to it instead."
    if key.endswith(("rollout_is", "rollout_is_level")):
        return (f"~{key}",), f"correction.weight is on and does this already: drop {key}."
    return (), "See docs/corrections.md for the part of ours that does it."


def _build_move(key: str, value: object, instead: str) -> tuple[str, ...]:
    """Build overrides that remove a key and, where one key takes the same value, set that one."""
    same = instead if key.rpartition(".")[2] == instead.rpartition(".")[2] else None
    level = instead if key.endswith("rollout_is_level") else None
    target = same or level
    if key.endswith("tis_imp_ratio_cap"):
        return (f"~{key}", set_to(f"{VERL}.rollout_is", "token"), set_to(instead, value))
    if key == "algorithm.rollout_is" and value is True:  # the level stood in a key of its own
        return (f"~{key}", set_to(instead, "token"))
    return (f"~{key}", *((set_to(target, value),) if target and value is not True and value is not False else ()))
