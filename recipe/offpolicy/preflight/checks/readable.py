"""Checks that run before all others: null sections, unresolved interpolations and values that cannot be read."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, UnsupportedInterpolationType

from verl_patches.execution_path import FULLY_ASYNC, find_program_mode

from ...batch.declared_keys import Key, count, flag, number
from ...correction.problem import Problem, set_to
from ..composed import ACTOR, BATCH, ESTIMATOR, MEGATRON, MINI_BATCH, ROLLOUT, VERL, copy_config
from .verl_correction import WORKERS

_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)\}")
_MISSING = re.compile(r"'([^']+)' not found")
_SECTIONS = (
    *("actor_rollout_ref", "actor_rollout_ref.model", ACTOR, f"{ACTOR}.policy_loss", ROLLOUT),
    *("algorithm", "data", "ray_kwargs", "trainer"),
)
_COUNT, _COUNT_OR_NULL = "a whole number of at least 1", "a whole number of at least 1, or null"
_WHOLE = count("a whole number", -sys.maxsize)
_READ: dict[str, tuple[Key, Any]] = {
    BATCH: (count(_COUNT), 1024),
    "data.max_prompt_length": (count(_COUNT), 512),
    "data.max_response_length": (count(_COUNT), 512),
    "trainer.nnodes": (count(_COUNT), 1),
    "trainer.n_gpus_per_node": (count(_COUNT), 8),
    "trainer.total_epochs": (count(_COUNT), 30),
    "trainer.total_training_steps": (count(_COUNT_OR_NULL, null=True), None),
    "trainer.save_freq": (_WHOLE, -1),
    "trainer.test_freq": (_WHOLE, -1),
    "trainer.val_only": (flag(), False),
    "trainer.val_before_train": (flag(), True),
    ESTIMATOR: (Key(lambda value: isinstance(value, str) and bool(value), "a name"), "grpo"),
    "algorithm.gamma": (number("a number"), 1.0),
    "algorithm.lam": (number("a number"), 1.0),
    "algorithm.kl_ctrl.kl_coef": (number("a number"), 0.001),
    f"{ROLLOUT}.n": (count(_COUNT), 1),
    f"{ROLLOUT}.temperature": (number("a number of at least 0", 0), 1.0),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": (count(_COUNT_OR_NULL, null=True), None),
    MINI_BATCH: (count(_COUNT), 256),
    f"{ACTOR}.ppo_epochs": (count(_COUNT), 1),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": (count(_COUNT_OR_NULL, null=True), None),
    f"{ACTOR}.kl_loss_coef": (number("a number"), 0.001),
    f"{ACTOR}.entropy_coeff": (number("a number"), 0),
    f"{ACTOR}.clip_ratio": (number("a number of at least 0", 0), 0.2),
    f"{ACTOR}.grad_clip": (number("a number of at least 0", 0), 1.0),
    f"{ACTOR}.ulysses_sequence_parallel_size": (count(_COUNT), 1),
    f"{MEGATRON}.tensor_model_parallel_size": (count(_COUNT), 1),
    f"{MEGATRON}.pipeline_model_parallel_size": (count(_COUNT), 1),
    f"{MEGATRON}.context_parallel_size": (count(_COUNT), 1),
}
"""Keys of verl that checks use in computations -> their allowed values, and a value that verl ships or documents."""


def find_null_sections(config: DictConfig) -> Iterator[Problem]:
    """Find null sections, on which every other check would fail."""
    of_v1 = ("trainer.v1",) if OmegaConf.select(config, "trainer.use_v1") else ()
    for key in (*_SECTIONS, *of_v1):
        owner, _, name = key.rpartition(".")
        node = _select(config, owner) if owner else config
        if isinstance(node, DictConfig) and name in node and not isinstance(_select(node, name), DictConfig):
            reason = "this section of verl's configuration contains keys that every launch reads."
            yield Problem(key, node._get_node(name)._value(), reason, "Remove this override.")  # type: ignore[union-attr]


def find_missing_actor(config: DictConfig) -> Iterator[Problem]:
    """Reject this package's options in programs other than verl's PPO, such as verl's SFT trainer."""
    owner, _, name = ACTOR.rpartition(".")
    section = _select(config, owner) if owner in config else {}
    if isinstance(section, Mapping) and name not in section:
        reason = "the program does not train with verl's PPO, and has no policy gradient to correct."
        yield Problem(ACTOR, None, reason, "Launch it without a correction.", parts=())


def find_former_actor(config: DictConfig) -> Iterator[Problem]:
    """Reject a program's configuration from before verl 0.5, in which sections do not name their dataclasses."""
    section = _select(config, ACTOR)
    if isinstance(section, DictConfig) and "_target_" not in section:
        reason = (
            "the section has no _target_; verl's own section has had one since 0.5, and the workers of this verl "
            "require it."
        )
        fix = "Install the verl release that the program was written for, or let its configuration inherit ppo_trainer."
        yield Problem(ACTOR, None, reason, fix, parts=())


def _select(config: DictConfig, key: str, default: Any = None) -> Any:
    """Return the value at a key; None for an unresolved interpolation."""
    try:
        return OmegaConf.select(config, key, default=default)
    except OmegaConfBaseException:
        return default


def find_unreadable_values(config: DictConfig) -> Iterator[Problem]:
    """Find values whose type differs from the type that the checks and verl expect."""
    for key, (kind, usual) in _READ.items():
        value = _select(config, key, ...)  # find_unresolved_interpolations reports values that cannot be resolved
        one_by_one = key == BATCH and value == 0 and find_program_mode(config) == FULLY_ASYNC
        if value is not ... and not one_by_one and not kind.fits(value):
            meant = () if key == ESTIMATOR else (set_to(key, usual),)  # there is no usual estimator
            fix = "" if meant else "Set the intended estimator, such as gae or grpo."
            yield Problem(key, value, f"not {kind.words}.", fix, overrides=meant)


def substitute_usual_values(config: DictConfig, keys: Iterable[str]) -> DictConfig:
    """Copy the configuration for the other checks, with unreadable keys set to their usual values or null."""
    changed = copy_config(config)
    for key in keys:
        OmegaConf.update(changed, key, _READ[key][1] if key in _READ else None, merge=False, force_add=True)
    return changed


def find_unresolved_interpolations(config: DictConfig) -> Iterator[Problem]:
    """Find interpolations of missing keys or variables; verl resolves all interpolations when it starts."""
    # The user's modules that verl imports may register a resolver.
    registered = bool(os.environ.get("VERL_USE_EXTERNAL_MODULES"))
    for key, written in _list_interpolations(config):
        try:
            OmegaConf.select(config, key)
        except OmegaConfBaseException as error:
            reason = str(error).split("\n")[0].strip().rstrip(".")
            if (missing := _MISSING.search(reason)) and missing[1] not in written:
                continue  # a key that interpolates a broken key works again once the broken key is fixed
            variable = _VARIABLE.search(written)
            fix = f"Export {variable[1]}, or set {key} to a value." if variable else f"Set {key} to a value."
            unknown = isinstance(error, UnsupportedInterpolationType) and registered
            yield Problem(key, written, f"{reason}.", fix, "NOTE" if unknown else "ERROR")


def _list_interpolations(node: DictConfig | ListConfig, path: str = "") -> Iterator[tuple[str, str]]:
    """List the keys that contain an interpolation, with the text of the interpolation."""
    if node._is_none() or node._is_missing():
        return
    names = range(len(node)) if isinstance(node, ListConfig) else list(node)
    for name in names:
        below = node._get_node(name)  # node[name] would resolve the interpolation
        key = f"{path}[{name}]" if isinstance(node, ListConfig) else f"{path}.{name}" if path else str(name)
        if OmegaConf.is_interpolation(node, name):
            yield key, str(below._value())  # type: ignore[union-attr]
        elif isinstance(below, DictConfig | ListConfig):
            yield from _list_interpolations(below, key)


_PAIR = re.compile(r"\+{0,2}(?P<key>[\w.]+)=(?P<value>[+-]?\d+(?:\.\d+)?(?:_\d+)+)\s*")
_BOUND = re.compile(r"(?P<side>(?:recovery_)?(?:lower|upper))|(?:\w+_)?(?:delta|budget|threshold|threshold_lower)")
"""Names of keys that may have a pair of bounds; in other keys, an underscore groups digits."""
_BOUNDED = (f"{VERL}.", f"{WORKERS}.", "correction.", "offpolicy.")


def find_pairs(overrides: Iterable[str]) -> Iterator[Problem]:
    """Find bounds that Hydra reads as one number unless they are quoted, such as 0.5_2 (0.52) and 1_01 (101)."""
    last = {override.partition("=")[0].lstrip("+~"): override for override in overrides}
    for override in last.values():
        found = _PAIR.fullmatch(override)
        if found is None or not found["key"].startswith(_BOUNDED):
            continue
        key, value = found["key"], found["value"]
        owner, _, name = key.rpartition(".")
        bound = _BOUND.fullmatch(name)
        if bound is None:
            continue
        lower, upper, *_ = value.split("_")
        fixes: tuple[str, ...] = (f"{key}={lower}",)
        fix = ""
        if key.endswith(("_threshold", "_threshold_lower")):
            fixes, fix = (set_to(key, value),), f"Set it to '{value}', and protect these quotes from the shell."
        elif "." not in value:  # probably a decimal comma, not two bounds
            fixes = (f"{key}={value.replace('_', '.', 1).replace('_', '')}",)
        elif bound["side"] and float(lower) < float(upper):
            owner = f"{owner}.{'recovery_' * name.startswith('recovery_')}"
            fixes = (f"{owner}lower={lower}", f"{owner}upper={upper}")
        reason = f"Hydra reads {value} as this number, because it ignores underscores in numbers."
        yield Problem(key, float(value), reason, fix, parts=_find_parts(key), overrides=fixes)


def _find_parts(key: str) -> tuple[str, ...]:
    """Return the part of a correction to which a key belongs, as a tuple; empty if it belongs to none."""
    if key.startswith("offpolicy."):
        return ()
    if key.startswith("correction."):
        names = key.split(".")
        return (".".join(names[1:3]) if names[1] in ("masks", "weights") else names[1],)
    name = key.rpartition(".")[2]
    owner = next((owner for owner in ("rollout_is", "rollout_rs") if name.startswith(owner)), name)
    return (f"rollout_correction.{owner}",)
