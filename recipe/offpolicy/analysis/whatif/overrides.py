"""Hydra overrides that compose a given correction, to be appended to those of any launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_patches.moved_options import MOVED

from ...correction import CorrectionSpec
from ...correction.problem import set_to
from ...correction.proximal import OF_THE_TRAINER
from ...preflight.hydra_groups import GROUP, list_options, load_option
from .compose import compose_correction

_BOUNDS = frozenset({"lower", "upper", "delta", "budget"})
_OPEN = "???"


def build_overrides(spec: CorrectionSpec) -> list[str]:
    """Build the overrides: shipped options by name where they match its parts, then single keys.

    Where pi_old is of the trainer's weights, which of the two ways is taken is left to the launch.
    """
    wanted = _plain(spec)
    compose_correction([f"{GROUP}=none"])  # the application in which options are looked up
    options = list_options()
    weight = [name for name in options if wanted["weight"] and _is_of(name, {"weight": wanted["weight"]})]
    # Of options that are alike but for their bounds, the one with these bounds, then the one with the shortest name.
    weight.sort(key=lambda name: (_differences(load_option(name)["weight"], wanted["weight"]), len(name), name))
    known = wanted["masks"].items()
    by_mask = {name: MOVED.get(name, name) for name, _ in known}
    masks = [
        name for name, mask in known if by_mask[name] in options and _is_of(by_mask[name], {"masks": {name: mask}})
    ]
    stack = [*weight[:1], *(by_mask[name] for name in masks)] or ["none"]
    overrides = [f"{GROUP}={stack[0]}" if len(stack) == 1 else f"{GROUP}=[{','.join(stack)}]"]
    if wanted["weight"] and not weight:
        overrides.append(set_to(f"{GROUP}.weight", wanted["weight"]))
    overrides += [f"+{set_to(f'{GROUP}.masks.{name}', mask)}" for name, mask in known if name not in masks]
    overrides += [f"+{set_to(f'{GROUP}.weights.{name}', one)}" for name, one in wanted.get("weights", {}).items()]
    if wanted.get("kl_weight"):  # whole: an open bound, null, is no default of a part that is not there
        overrides.append(set_to(f"{GROUP}.kl_weight", wanted["kl_weight"], add=True))
    composed = compose_correction(overrides)
    there = dict(_leaves(composed))
    # Compared after parsing: defaults that the spec fills in need no override.
    had = dict(_leaves(_plain(CorrectionSpec.from_mapping(_filled(composed, wanted)))))
    return overrides + [
        set_to(f"{GROUP}.{key}", value, add=key not in there)
        for key, value in _leaves(wanted)
        if had.get(key) != value or there.get(key) == _OPEN
    ]


def _plain(spec: CorrectionSpec) -> dict[str, Any]:
    plain = spec.to_mapping()
    return plain | {"proximal": "recompute"} if plain["proximal"] in OF_THE_TRAINER else plain


def _is_of(option: str, part: Mapping[str, Any]) -> bool:
    """Check whether an option sets this part and nothing else, but for its bounds."""
    values = dict(_leaves(load_option(option)))
    return {key.rpartition(".")[0] for key in values} == {key.rpartition(".")[0] for key, _ in _leaves(part)} and all(
        key.rpartition(".")[2] in _BOUNDS or dict(_leaves(part)).get(key) == value for key, value in values.items()
    )


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    return sum(one.get(name) != other.get(name) for name in _BOUNDS)


def _filled(plain: Any, wanted: Any) -> Any:
    """Fill what is open in ``plain`` from ``wanted``."""
    if isinstance(plain, Mapping) and isinstance(wanted, Mapping):
        return {key: _filled(value, wanted.get(key)) for key, value in plain.items()}
    return wanted if plain == _OPEN else plain


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of all that is no mapping; an empty mapping has none."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
