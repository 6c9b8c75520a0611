"""Checks of verl's own correction without bypass mode: its keys need one another, and mu."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_patches.execution_path import LivePath

from ...correction import CorrectionSpec
from ...correction.problem import Problem, set_to
from .keys import BYPASS, ROLLOUT, VERL, find_changed_keys, get_value, list_active, name_part

UNREAD = {
    "loss_type": (BYPASS, "verl reads it in bypass mode alone."),
    "rollout_is_threshold": ("rollout_is", "there is no weight to bound."),
    "rollout_is_batch_normalize": ("rollout_is", "there is no weight to normalise."),
    "rollout_rs_threshold": ("rollout_rs", "there is no rejection to bound."),
}
"""Keys of verl's correction -> the key without which nothing reads them, and why."""


def check_decoupled(config: DictConfig, spec: CorrectionSpec, path: LivePath) -> Iterator[Problem]:
    """Check that no key lacks another without which nothing reads it, and that mu is computed."""
    given = find_changed_keys(config)
    own = {key: value for key, value in given.items() if value is not None}  # null asks for nothing
    if not spec.is_none or not own:
        return
    for key, (needed, because) in UNREAD.items():
        if key in own and needed not in own:
            fix = f"Set {VERL}.{needed}, or leave this out."
            yield Problem(f"{VERL}.{key}", own[key], because, fix, "NO-OP", (name_part(key),))
    weight = (name_part("rollout_is"),)
    key = f"{VERL}.rollout_is_threshold"
    if "rollout_is" in own and given.get("rollout_is_threshold", 2.0) is None:
        reason = f"without a threshold verl leaves out the weight that rollout_is={own['rollout_is']} asks for."
        yield Problem(key, None, reason, "Set it to 2.0.", "NO-OP", weight, (set_to(key, 2.0),))
    threshold = own.get("rollout_is_threshold")
    if not path.attributes.bound_pairs and isinstance(threshold, str):
        reason = f"verl {path.release} takes one number, the cap; a pair of bounds came with 0.8."
        yield Problem(
            key, threshold, reason, "Set one number, or correction=icepop with its lower and upper.", parts=weight
        )
    key = f"{ROLLOUT}.calculate_log_probs"
    if not (computed := get_value(config, key)):
        reason = f"without the engine's log-probs verl silently skips its correction, {', '.join(own)}."
        parts = tuple(name_part(asked) for asked in list_active(config) or own)
        yield Problem(key, computed, reason, "Set it to true.", "NO-OP", parts, (set_to(key, True),))
