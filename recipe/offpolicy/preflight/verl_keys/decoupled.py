"""verl's own correction without bypass mode: whether its keys are said so that they act, and get mu."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_patches.execution_path import LivePath

from ...correction import CorrectionSpec
from ...correction.problem import Problem, set_to
from .keys import BYPASS, DEFAULTS, ROLLOUT, VERL, active, changes, part, value_of

UNREAD = {
    "loss_type": (BYPASS, "verl reads it in bypass mode alone."),
    "rollout_is_threshold": ("rollout_is", "there is no weight to bound."),
    "rollout_is_batch_normalize": ("rollout_is", "there is no weight to normalise."),
    "rollout_rs_threshold": ("rollout_rs", "there is no rejection to bound."),
}
"""Keys of verl's correction -> the key without which nothing reads them, and why."""


def correction_of_verl(config: DictConfig, spec: CorrectionSpec, path: LivePath) -> Iterator[Problem]:
    """Keys that nothing reads without another, and the log-probs that everything reads."""
    given = changes(config)
    own = {key: value for key, value in given.items() if value is not None}  # null asks for nothing
    if not spec.is_none or not own:
        return
    for key, (needed, because) in UNREAD.items():
        if key in own and needed not in own:
            yield Problem(
                f"{VERL}.{key}",
                own[key],
                because,
                f"Set {VERL}.{needed}, or leave this out.",
                "INERT",
                (part(key),),
                (set_to(f"{VERL}.{key}", DEFAULTS[key]),),
            )
    weight = (part("rollout_is"),)
    if "rollout_is" in own and given.get("rollout_is_threshold", 2.0) is None:
        key = f"{VERL}.rollout_is_threshold"
        reason = f"without a threshold verl leaves out the weight that rollout_is={own['rollout_is']} asks for."
        yield Problem(key, None, reason, "Set it to 2.0.", "INERT", weight, (set_to(key, 2.0),))
    threshold = own.get("rollout_is_threshold")
    if not path.attributes.bound_pairs and isinstance(threshold, str):
        key = f"{VERL}.rollout_is_threshold"
        yield Problem(
            key,
            threshold,
            f"verl {path.release} takes one number, the cap; a pair of bounds came with 0.8.",
            "Set one number, or correction=icepop with its lower and upper.",
            "WRONG",
            weight,
            (set_to(key, DEFAULTS["rollout_is_threshold"]),),
        )
    key = f"{ROLLOUT}.calculate_log_probs"
    if not value_of(config, key):
        yield Problem(
            key,
            value_of(config, key),
            f"without the engine's log-probs verl skips its correction, {', '.join(own)}, without a word.",
            "Set it to true.",
            "INERT",
            tuple(part(asked) for asked in active(config) or own),
            (set_to(key, True),),
        )
