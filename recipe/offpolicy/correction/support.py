"""Keys of the support of truncated sampling, see ``CorrectionParts``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .correction_parts import SupportUnknown
from .problem import SpecError
from .validation import read_choice, read_number

KEYS = ("support", "support_unknown", "support_size", "support_min_p")


def read_support(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of the support from the plain values under ``correction``.

    Raises:
        SpecError: a malformed value, or one that nothing reads.

    Example:
        >>> read_support({"support": "engine", "support_size": 8})
        {'support': 'engine', 'support_unknown': 'mask', 'support_size': 8, 'support_min_p': None}
    """
    support = mapping.get("support")
    if support is not None:
        read_choice(mapping, "support", ("engine",), "correction")
    fields = {
        "support": support,
        "support_unknown": read_choice(mapping, "support_unknown", SupportUnknown, "correction", "mask"),
        "support_size": _read_size(mapping.get("support_size")),
        "support_min_p": _read_min_p(mapping.get("support_min_p")),
    }
    unread = {"support_unknown": "mask", "support_size": None, "support_min_p": None}
    for name, off in unread.items() if support is None else ():
        if fields[name] != off:
            raise SpecError(
                "read with correction.support=engine alone.",
                f"Set correction.support=engine, or correction.{name}={'null' if off is None else off}.",
                key=f"correction.{name}",
                value=fields[name],
                proposed={"correction.support": "engine"},
            )
    return fields


def _read_size(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise SpecError(
        "expected a number of tokens, 1 or more, or null to go by top-k.",
        "Set correction.support_size=null for example.",
        key="correction.support_size",
        value=value,
        proposed={"correction.support_size": None},
    )


def _read_min_p(value: Any) -> float | None:
    number = read_number(value, "correction.support_min_p")
    if number is not None and not 0 < number < 1:
        raise SpecError(
            "a share of the likeliest token's probability, above 0 and below 1.",
            "Set correction.support_min_p=0.1 for example, or null for none.",
            key="correction.support_min_p",
            value=number,
            proposed={"correction.support_min_p": 0.1},
        )
    return number
