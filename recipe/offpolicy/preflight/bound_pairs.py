"""Detection of bounds with an underscore on the command line, which Hydra reads as one number: 0.5_2 is 0.52."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ..correction import Problem
from ..correction.problem import set_to
from .checks.verl_correction import WORKERS
from .composed import VERL

_OVERRIDE = re.compile(r"\+{0,2}(?P<key>[\w.]+)=(?P<value>[+-]?[\d.]+(?:_[\d.]+)+)\s*")
_BOUND = re.compile(r"(?P<which>recovery_)?(?:lower|upper)|(?:\w+_)?(?:delta|budget|threshold|threshold_lower)")
"""Names of keys that may take a pair of bounds; in other keys an underscore groups digits."""
_SECTIONS = (f"{VERL}.", f"{WORKERS}.", "correction.", "offpolicy.")


def find_pairs(overrides: Iterable[str]) -> Iterator[Problem]:
    """Find bounds that Hydra reads as one number, 0.5_2 as 0.52 and 1_01 as 101, unless quoted for Hydra."""
    last = {override.partition("=")[0].lstrip("+~"): override for override in overrides}
    for override in last.values():
        found = _OVERRIDE.fullmatch(override)
        if found is None or not found["key"].startswith(_SECTIONS):
            continue
        key, value = found["key"], found["value"]
        owner, _, name = key.rpartition(".")
        bound = _BOUND.fullmatch(name)
        if bound is None:
            continue
        try:
            number = float(value)
        except ValueError:  # 0.5_2.0, which stays a string
            continue
        reason = f"Hydra reads {value} as this number, because it ignores underscores in numbers."
        if key.endswith(("_threshold", "_threshold_lower")):
            fix = f"Set it to '{value}', and protect these quotes from the shell."
            yield Problem(key, number, reason, fix, parts=_find_parts(key), overrides=(set_to(key, value),))
            continue
        lower, upper, *_ = value.split("_")
        pair = name.endswith(("lower", "upper")) and float(lower) < float(upper)
        bounds = (f"{owner}.{bound['which'] or ''}lower={lower}", f"{owner}.{bound['which'] or ''}upper={upper}")
        if "." in value:
            fixes = bounds if pair else (f"{key}={lower}",)
        else:  # probably a decimal comma, not two bounds
            fixes = (f"{key}={value.replace('_', '.', 1).replace('_', '')}",)
        # No one writes a bound as 02, so 1_02 means 1.02.
        two = pair and fixes != bounds and upper == (upper.lstrip("0") or "0")
        other = f", or {bounds[0]} and {bounds[1]} if two bounds are meant" if two else ""
        fix = f"Set {' and '.join(fixes)}{other}."
        yield Problem(key, number, reason, fix, parts=_find_parts(key), overrides=fixes)


def _find_parts(key: str) -> tuple[str, ...]:
    """Return the part of a correction that a key belongs to, as a tuple; empty if it belongs to none."""
    if key.startswith("offpolicy."):
        return ()
    if key.startswith("correction."):
        names = key.split(".")
        return (".".join(names[1:3]) if names[1] in ("masks", "weights") else names[1],)
    name = key.rpartition(".")[2]
    owner = next((owner for owner in ("rollout_is", "rollout_rs") if name.startswith(owner)), name)
    return (f"rollout_correction.{owner}",)
