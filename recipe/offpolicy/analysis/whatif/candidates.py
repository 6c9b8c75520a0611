"""Corrections to replay: the recorded one, corrections composed from overrides, and grids over either."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ...correction import CorrectionSpec, SpecError
from ...preflight.hydra_groups import GROUP
from .compose import compose_correction, initialize_composer, parse_grid, parse_value, suggest_keys

RECORDED = "recorded"
"""Stands for the correction that acted, which may change from step to step."""
UNCORRECTED = "uncorrected"
"""Stands for a correction with the recorded pi_old but without weight or mask."""
MOST = 400
"""Largest number of corrections in one replay."""
_OPTIONAL = (
    "sign",
    "normalize",
    "aggregate",
    "ratio",
    "by_staleness",
)  # keys of masks and weights that options may leave out


@dataclass(frozen=True)
class Candidate:
    """A correction to replay.

    Attributes:
        label: its overrides, unique within a replay.
        base: the label without the grid's values.
        point: the given values of the grid, by key; empty without a grid.
        spec: None if it depends on the recorded correction, or if the point is invalid.
        error: why the point is invalid; None if it is valid.
    """

    label: str
    base: str
    point: Mapping[str, str] = field(default_factory=dict)
    spec: CorrectionSpec | None = None
    error: str | None = None

    def resolve_spec(self, recorded: Mapping[str, Any]) -> CorrectionSpec:
        """Return the correction for a step at which ``recorded`` acted.

        Raises:
            SpecError: the correction is malformed.
        """
        if self.spec is not None:
            return self.spec
        if self.base == UNCORRECTED:
            return CorrectionSpec.from_mapping({key: recorded.get(key) for key in ("proximal", "alpha")})
        return CorrectionSpec.from_mapping(_changed(recorded, self.point))


def build_candidates(
    specs: Sequence[Sequence[str]], grids: Sequence[str], recorded: Mapping[str, Any]
) -> tuple[Candidate, ...]:
    """Build all corrections of a replay: every spec crossed with the grid keys that it has.

    The recorded correction stays unchanged for comparison, unless it is the only spec.

    Args:
        specs: overrides of each correction, or ``["recorded"]``.
        grids: ``key=value,value`` each; all grids are crossed.
        recorded: plain values of the correction that acted at the first step.

    Raises:
        SpecError: a spec is malformed without a grid, no spec has a grid key, or there are more than ``MOST``.
    """
    axes = [parse_grid(grid) for grid in grids]
    repeated = [key for index, (key, _) in enumerate(axes) if key in [other for other, _ in axes[:index]]]
    if repeated:
        raise SpecError(f"--grid {repeated[0]} is given twice. Put all of its values into one, separated by commas.")
    with initialize_composer():
        bases = [_compose_base(list(overrides), recorded) for overrides in specs]
    alone = all(label == RECORDED for label, _ in bases)
    crossed = [mapping for label, mapping in bases if alone or label != RECORDED]
    for key, _ in axes:
        if not any(_has(mapping, key) for mapping in crossed):
            raise SpecError(_unknown(key, crossed))
    found: dict[str, Candidate] = {}
    for label, mapping in bases:
        own = [axis for axis in axes if _has(mapping, axis[0])] if alone or label != RECORDED else []
        for point in _points(own):
            candidate = _candidate(label, mapping, point)
            # Two specs may yield the same correction, which is then replayed once.
            found.setdefault(candidate.label, candidate)
            if len(found) > MOST:
                raise SpecError(f"--grid: the values yield more than {MOST} corrections. Give fewer values.")
    return tuple(found.values())


def _compose_base(overrides: list[str], recorded: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Compose label and plain values of a spec."""
    if overrides == [RECORDED]:
        return RECORDED, recorded
    if RECORDED in overrides:
        raise SpecError(
            f"--spec {' '.join(overrides)}: {RECORDED} takes no overrides. Use --grid key=value to vary the recorded "
            f"correction."
        )
    return " ".join(overrides), compose_correction(overrides)


def _candidate(base: str, mapping: Mapping[str, Any], point: Mapping[str, str]) -> Candidate:
    label = " ".join([base, *(f"{key}={value}" for key, value in point.items())])
    try:
        spec = CorrectionSpec.from_mapping(_changed(mapping, point))
    except SpecError as error:
        if not point:
            raise
        # A grid may yield bounds that exclude each other; the other points are still replayed.
        return Candidate(label, base, point, error=str(error))
    return Candidate(label, base, point, None if base == RECORDED else spec)


def _points(axes: Sequence[tuple[str, list[str]]]) -> Iterator[dict[str, str]]:
    keys = [key for key, _ in axes]
    for values in itertools.product(*(values for _, values in axes)):
        yield dict(zip(keys, values, strict=True))


def _changed(mapping: Mapping[str, Any], point: Mapping[str, str]) -> dict[str, Any]:
    changed: dict[str, Any] = deepcopy(dict(mapping))
    for key, value in point.items():
        *path, leaf = key.split(".")[1:]
        node = changed
        for name in path:
            node = node[name]
        node[leaf] = parse_value(value)
    return changed


def _has(mapping: Mapping[str, Any], key: str) -> bool:
    """Check whether a grid over ``key`` changes this correction."""
    return key in _known(mapping)


def _known(mapping: Mapping[str, Any]) -> list[str]:
    """List the dotted keys that have their own value, and those that an option may leave out."""
    return [f"{GROUP}.{path}" for path in _leaves(mapping)]


def _leaves(mapping: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in mapping.items():
        here = f"{path}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{here}.")
            yield from (f"{here}.{key}" for key in _OPTIONAL if name not in ("masks", "weights") and key not in value)
        elif not isinstance(value, Mapping):
            yield here


def _unknown(key: str, mappings: Sequence[Mapping[str, Any]]) -> str:
    known = list({name for mapping in mappings for name in _known(mapping)})
    return f"--grid {key}: no --spec has this key. {suggest_keys(key, known)}"
