"""Values of other keys that a feature needs, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .problem import Problem, set_to


@dataclass(frozen=True)
class Requirement:
    """One key.

    Attributes:
        key: Hydra path.
        wanted: values that the feature works with, the first of which is proposed; null and a missing key are fine.
        reason: why it does not work with others.
        together: further keys to set with the proposed value, and their values.
    """

    key: str
    wanted: tuple[Any, ...]
    reason: str
    together: tuple[tuple[str, Any], ...] = ()


def find_unmet(
    requirements: Iterable[Requirement],
    read: Callable[[str], Any],
    off: str,
    parts: tuple[str, ...],
    alongside: Mapping[str, Any] | None = None,
) -> Iterator[Problem]:
    """Find keys that have other values than a feature needs.

    Args:
        read: returns the value of a key; None where it is null or missing.
        off: the override that switches the feature off.
        parts, alongside: see ``Problem``.

    Example:
        >>> rows = [Requirement("model.fused", (False,), "fused kernels hide the logits.")]
        >>> print(*find_unmet(rows, {"model.fused": True}.get, "support=null", ("support",)))
        model.fused=true: fused kernels hide the logits. Set model.fused=false, or support=null.
    """
    for each in requirements:
        value = read(each.key)
        if value is None or value in each.wanted:
            continue
        proposed = (set_to(each.key, each.wanted[0]), *(set_to(*other) for other in each.together))
        fix = f"Set {' and '.join(proposed)}, or {off}."
        yield Problem(each.key, value, each.reason, fix, "ERROR", parts, proposed, dict(alongside or {}))
