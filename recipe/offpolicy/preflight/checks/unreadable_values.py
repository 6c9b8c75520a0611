"""Detection of values in verl's keys that no check can read: unresolved interpolations, and wrong types."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, UnsupportedInterpolationType

from verl_patches.execution_path import FULLY_ASYNC, find_program_mode

from ...correction import Problem
from ...correction.problem import set_to
from .config_reader import ACTOR, ROLLOUT, copy_config

_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)\}")
_MISSING = re.compile(r"'([^']+)' not found")
_EXTERNAL = "VERL_USE_EXTERNAL_MODULES"


@dataclass(frozen=True)
class _Kind:
    """A kind of value: its name in a sentence, and its predicate."""

    name: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_COUNT = _Kind("a whole number of at least 1", lambda value: _is_whole(value) and value >= 1)
_COUNT_OR_NULL = _Kind(f"{_COUNT.name}, or null", lambda value: value is None or _COUNT.holds(value))
_NUMBER = _Kind("a number", _is_finite)
_POSITIVE = _Kind("a number of at least 0", lambda value: _is_finite(value) and value >= 0)
_WHOLE = _Kind("a whole number", _is_whole)
_SWITCH = _Kind("true or false", lambda value: isinstance(value, bool))
_NAME = _Kind("a name", lambda value: isinstance(value, str) and bool(value))

_MEGATRON = f"{ACTOR}.megatron"
_BATCH = "data.train_batch_size"
_READ: dict[str, tuple[_Kind, Any]] = {
    _BATCH: (_COUNT, 1024),
    "data.max_prompt_length": (_COUNT, 512),
    "data.max_response_length": (_COUNT, 512),
    "trainer.nnodes": (_COUNT, 1),
    "trainer.n_gpus_per_node": (_COUNT, 8),
    "trainer.total_epochs": (_COUNT, 30),
    "trainer.total_training_steps": (_COUNT_OR_NULL, None),
    "trainer.save_freq": (_WHOLE, -1),
    "trainer.test_freq": (_WHOLE, -1),
    "trainer.val_only": (_SWITCH, False),
    "trainer.val_before_train": (_SWITCH, True),
    "algorithm.adv_estimator": (_NAME, "grpo"),
    "algorithm.gamma": (_NUMBER, 1.0),
    "algorithm.lam": (_NUMBER, 1.0),
    "algorithm.kl_ctrl.kl_coef": (_NUMBER, 0.001),
    f"{ROLLOUT}.n": (_COUNT, 1),
    f"{ROLLOUT}.temperature": (_POSITIVE, 1.0),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": (_COUNT_OR_NULL, None),
    f"{ACTOR}.ppo_mini_batch_size": (_COUNT, 256),
    f"{ACTOR}.ppo_epochs": (_COUNT, 1),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": (_COUNT_OR_NULL, None),
    f"{ACTOR}.kl_loss_coef": (_NUMBER, 0.001),
    f"{ACTOR}.entropy_coeff": (_NUMBER, 0),
    f"{ACTOR}.clip_ratio": (_POSITIVE, 0.2),
    f"{ACTOR}.grad_clip": (_POSITIVE, 1.0),
    f"{ACTOR}.ulysses_sequence_parallel_size": (_COUNT, 1),
    f"{_MEGATRON}.tensor_model_parallel_size": (_COUNT, 1),
    f"{_MEGATRON}.pipeline_model_parallel_size": (_COUNT, 1),
    f"{_MEGATRON}.context_parallel_size": (_COUNT, 1),
}
"""Keys of verl that checks compute with -> the kind of value, and one that verl ships or documents."""


def find_unreadable_values(config: DictConfig) -> Iterator[Problem]:
    """Find values of another kind than the checks and verl compute with."""
    for key, (kind, usual) in _READ.items():
        try:
            value = OmegaConf.select(config, key, default=...)
        except OmegaConfBaseException:
            continue  # reported by find_unresolved_interpolations
        if key == _BATCH and value == 0 and find_program_mode(config) == FULLY_ASYNC:
            continue  # its prompts come one at a time
        if value is not ... and not kind.holds(value):
            yield Problem(key, value, f"not {kind.name}.", overrides=(set_to(key, usual),))


def substitute_usual_values(config: DictConfig, keys: Iterable[str]) -> DictConfig:
    """Copy the configuration with unreadable keys set to their usual values, or null, for the other checks."""
    changed = copy_config(config)
    for key in keys:
        _, usual = _READ.get(key, (None, None))
        OmegaConf.update(changed, key, usual, merge=False, force_add=True)
    return changed


def find_unresolved_interpolations(config: DictConfig) -> Iterator[Problem]:
    """Find interpolations of missing keys or variables; verl resolves all of them at its start."""
    found = list(_find_unresolved(config))
    named = {missing for _, missing, by_itself in found if by_itself}
    # A key that interpolates a broken key works again once that one does.
    yield from (problem for problem, missing, by_itself in found if by_itself or missing not in named)


def _find_unresolved(config: DictConfig) -> Iterator[tuple[Problem, str, bool]]:
    """Find each problem, what OmegaConf says is missing, and whether the interpolation itself names that."""
    for key, written in _list_interpolations(config):
        try:
            OmegaConf.select(config, key)
        except OmegaConfBaseException as error:
            variable = _VARIABLE.search(written)
            reason = str(error).split("\n")[0].strip().rstrip(".")
            missing = _MISSING.search(reason)
            fix = f"Export {variable[1]}, or set {key} to a value." if variable else f"Set {key} to a value."
            # Modules of the user's, which verl imports, may register a resolver.
            unknown = isinstance(error, UnsupportedInterpolationType) and bool(os.environ.get(_EXTERNAL))
            problem = Problem(key, written, f"{reason}.", fix, "NOTE" if unknown else "ERROR")
            yield problem, reason, missing is not None and missing[1] in written


def _list_interpolations(node: DictConfig | ListConfig, path: str = "") -> Iterator[tuple[str, str]]:
    """List the keys that hold an interpolation, with its text."""
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
