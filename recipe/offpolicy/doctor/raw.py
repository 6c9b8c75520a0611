"""What Hydra and YAML make of an override's text before anybody sees it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ..findings import Problem, set_to
from ..verl_keys.reading import VERL, WORKERS

_OVERRIDE = re.compile(r"\+{0,2}(?P<key>[\w.]+)=(?P<value>[+-]?[\d.]+(?:_[\d.]+)+)\s*")
_BOUND = re.compile(r"(?P<which>recovery_)?(?:lower|upper)|(?:\w+_)?(?:delta|budget|threshold|threshold_lower)")
"""Names of keys that a pair of bounds may be meant for; elsewhere an underscore groups digits."""
_SECTIONS = (f"{VERL}.", f"{WORKERS}.", "correction.", "offpolicy.")


def numbers_of_pairs(overrides: Iterable[str]) -> Iterator[Problem]:
    """Pairs of bounds that became one number: 0.5_2 is 0.52, and 2_5 is 25, unless they stand in quotes of Hydra's."""
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
        reason = f"Hydra reads an underscore inside a number as nothing: this is {number:g}."
        if key.endswith(("_threshold", "_threshold_lower")):
            fix = f"Set it to '{value}', in quotes that the shell leaves."
            mends: tuple[str, ...] = (set_to(key, value),)
        else:
            lower, upper, *_ = value.split("_")
            which = bound["which"] or ""
            bounds = (f"{owner}.{which}lower={lower}", f"{owner}.{which}upper={upper}")
            band = name.endswith(("lower", "upper"))
            fix = f"Set {bounds[0]} and {bounds[1]}." if band else f"Write {key} without an underscore."
            mends = bounds if band else ()
        yield Problem(key, value, reason, fix, "WRONG", _parts(key), mends)


def _parts(key: str) -> tuple[str, ...]:
    """The part of a correction that a key belongs to, if it is of one."""
    if key.startswith("offpolicy."):
        return ()
    if key.startswith("correction."):
        names = key.split(".")
        return (".".join(names[1:3]) if names[1] == "masks" else names[1],)
    name = key.rpartition(".")[2]
    owner = next((owner for owner in ("rollout_is", "rollout_rs") if name.startswith(owner)), name)
    return (f"rollout_correction.{owner}",)
