"""Check for verl's own correction or policy loss in a section that is misspelled, or stands where nothing reads it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...correction import CorrectionSpec
from ...correction.problem import Problem, format_value, set_to
from ...correction.spelling import find_closest
from .former_names import FORMER, OBSOLETE
from .keys import ACTOR, DEFAULTS, FREE, LOSS_MODE, VERL, name_part

_LOSS = "policy_loss"
_SECTION = VERL.rpartition(".")[2]
_DISTINCT = [key for key in (*DEFAULTS, *OBSOLETE) if key not in ("loss_type", "use_policy_gradient")]
"""Keys whose names say that they belong to a correction of verl's, wherever they stand."""
_READ = (f"{VERL}.", f"{ACTOR}.{_LOSS}.")
"""Sections with checks of their own."""


def find_meant(names: Sequence[str]) -> str | None:
    """Find the key of verl's own correction or policy loss that a key stands for; None if it resembles none.

    Args:
        names: the segments of the key, which stands somewhere else or is misspelled.
    """
    key = ".".join(names)
    if key.startswith(_READ) or key in FORMER or any(map(FREE.search, names)):
        return None
    for place, name in enumerate(names):
        if find_closest(name, [_SECTION], 0.75):
            return ".".join([VERL, *(find_closest(each, DEFAULTS) or each for each in names[place + 1 :])])
        if find_closest(name, [_LOSS], 0.85) and place + 1 < len(names):
            return ".".join([ACTOR, _LOSS, *names[place + 1 :]])
    if names[-1] == "loss_mode" and names[0] != "distillation":
        return LOSS_MODE
    near = difflib.get_close_matches(names[-1].lower(), _DISTINCT, 1, 0.89)  # rollout_n is none
    return f"{VERL}.{near[0]}" if near else None


def check_misplaced(config: DictConfig, spec: CorrectionSpec, skipped: Collection[str]) -> Iterator[Problem]:
    """Find keys of verl's own correction or policy loss outside the sections that verl reads.

    Args:
        skipped: sections at the top of other owners.
    """
    plain: Any = OmegaConf.to_container(config, resolve=False)
    for names, value in _list_leaves({name: each for name, each in plain.items() if name not in skipped}, ()):
        meant = find_meant(names)
        leaf = names[-1]
        if meant is None or value is None or value == {**DEFAULTS, "loss_mode": "vanilla"}.get(leaf, ...):
            continue
        key, loss = ".".join(names), meant == LOSS_MODE
        known = loss or meant.rpartition(".")[2] in DEFAULTS
        moved = (f"~{key}", set_to(meant, value)) if known and (loss or spec.is_none) else ()
        reason = "nothing reads it there, and what it asks for would not be done."
        fix = f"Did you mean {meant}={format_value(value)}?" if known else f"Did you mean {meant}?"
        yield Problem(key, value, reason, fix, "ERROR", (key if loss else name_part(leaf),), moved)


def _list_leaves(values: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _list_leaves(value, (*path, str(name)))
        else:
            yield (*path, str(name)), value
