"""Fixes of malformed values under ``correction``: the selected options' own values instead of a guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from ..correction import Problem, SpecError
from ..correction.problem import set_to
from ..correction.validation import read_numbers
from .hydra_groups import GROUP, load_option, read_chosen_options
from .own_keys import CONFIG_DIR

_MISSING = "???"
_NAMES = ("upper", "delta", "budget", "coefficient")
"""Keys of a part that a single number may be meant for, if the option gives this part one of them."""


def restore_defaults(problem: Problem) -> Problem:
    """Return a problem whose overrides set its key to what the selected options have there.

    A translation of what was meant stays, and so does every fix of a key that the options leave alone.
    """
    if problem.translated or not problem.key.startswith(f"{GROUP}."):
        return problem
    default = _read_default(problem.key.split(".")[1:])
    whole_part = problem.key.count(".") == 1
    if default in (..., _MISSING, problem.value) or (whole_part and default is None):
        return problem
    if isinstance(default, Mapping):
        if problem.value in (None, False) or isinstance(problem.value, Mapping):
            return problem
        pair = sorted(read_numbers(problem.value)) if {"lower", "upper"} <= default.keys() else []
        if len(pair) == 2:
            bounds: dict[str, Any] = {"lower": pair[0], "upper": pair[1]}
            if default.get("kind") == "truncate":  # of an upper bound alone
                bounds["kind"] = "clip"
            fix = f"Set {' and '.join(set_to(f'{problem.key}.{name}', each) for name, each in bounds.items())} instead."
            whole = set_to(problem.key, {**default, **bounds})
            return replace(problem, fix=fix, overrides=(whole,) if pair[0] <= 1 else ())  # it leaves out 1
        default = _translate(problem.value, default)
    return replace(problem, fix="", overrides=(set_to(problem.key, default),))


def _read_default(path: Sequence[str]) -> Any:
    """Read a key from the selected options over the shipped base; ``...`` where neither has it."""
    base: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "offpolicy_base.yaml"), resolve=False)
    try:
        values = [load_option(option) for option in read_chosen_options()]
    except SpecError:
        values = []
    return next((found for each in (*values, base[GROUP]) if (found := _select(each, path)) is not ...), ...)


def _select(values: Any, path: Sequence[str]) -> Any:
    for name in path:
        values = values.get(name, ...) if isinstance(values, Mapping) else ...
    return values


def _translate(value: Any, part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put a number that was given for a whole part into it; as shipped where it does not fit."""
    numbers = read_numbers(value)
    single = next((name for name in _NAMES if part.get(name) is not None), None)
    if len(numbers) == 1 and single is not None and part.get("lower") is None:
        return {**part, single: numbers[0]}
    return part
