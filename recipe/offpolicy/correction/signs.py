"""Which advantages a weight or a mask looks at: those of one sign, of the row or of each token."""

from __future__ import annotations

from typing import Any, Literal

from .problem import SpecError

When = Literal["any", "negative", "positive"]
Sign = Literal["row", "token"]
MaskWhen = Literal["any", "negative", "positive", "outward"]
"""A mask can also look at tokens whose update takes the two policies of its ratio r further apart: A log r > 0."""


def check_sign_is_read(when: MaskWhen, sign: Sign, key: str, proposed: dict[str, Any]) -> None:
    """Check that ``sign`` says whose advantage only where one is looked at.

    Raises:
        SpecError: ``sign=token`` alongside ``when=any``.

    Example:
        >>> check_sign_is_read("negative", "token", "correction.masks.opsm", {})
    """
    if sign == "token" and when == "any":
        raise SpecError(
            "no advantage is looked at.",
            f"Set {key}.when=negative or positive, or {key}.sign=row.",
            key=f"{key}.sign",
            value="token",
            alongside={f"{key}.when": "any"},
            proposed=proposed,
        )


def overlap(one: tuple[When, Sign], other: tuple[When, Sign]) -> bool:
    """Return True if some token can be looked at by both, each a pair of ``when`` and ``sign``.

    Example:
        >>> overlap(("negative", "row"), ("positive", "row")), overlap(("negative", "row"), ("positive", "token"))
        (False, True)
    """
    (when, sign), (other_when, other_sign) = one, other
    return "any" in (when, other_when) or when == other_when or sign != other_sign
