"""Which tokens a weight or a mask applies to: by the sign of an advantage, or those after a tool's result."""

from __future__ import annotations

from typing import Any, Literal

from .problem import SpecError

When = Literal["any", "negative", "positive", "post_tool"]
Sign = Literal["row", "token"]
MaskWhen = Literal["any", "negative", "positive", "outward", "post_tool"]
"""A mask can also look at tokens whose update takes the two policies of its ratio r further apart: A log r > 0."""


def check_sign_is_read(when: MaskWhen, sign: Sign, key: str, proposed: dict[str, Any]) -> None:
    """Check that ``sign`` says whose advantage only where one is looked at.

    Raises:
        SpecError: ``sign=token`` alongside ``when=any`` or ``post_tool``.

    Example:
        >>> check_sign_is_read("negative", "token", "correction.masks.opsm", {})
    """
    if sign == "token" and when in ("any", "post_tool"):
        raise SpecError(
            "no advantage is looked at.",
            f"Set {key}.when=negative or positive, or {key}.sign=row.",
            key=f"{key}.sign",
            value="token",
            alongside={f"{key}.when": when},
            proposed=proposed,
        )


def check_tool_is_seen(when: MaskWhen, level: str, by_age: bool, key: str) -> None:
    """Check that a part after a tool's result has units that such a result can lie in, and one bound for all ages.

    Raises:
        SpecError: ``when=post_tool`` at level prefix, or by age.

    Example:
        >>> check_tool_is_seen("post_tool", "sequence", False, "correction.masks.opsm")
    """
    if when != "post_tool" or not (level == "prefix" or by_age):
        return
    reason = (
        "a prefix holds the tokens before the tool's result too." if level == "prefix" else "it goes by age as well."
    )
    raise SpecError(
        f"post_tool is for parts by token, turn, version or sequence, with one bound for all ages: {reason}",
        key=f"{key}.when",
        value="post_tool",
        alongside={f"{key}.level": "prefix"} if level == "prefix" else {},
        proposed={f"{key}.when": "any"},
    )


def overlap(one: tuple[When, Sign], other: tuple[When, Sign]) -> bool:
    """Return True if some token can be looked at by both, each a pair of ``when`` and ``sign``.

    Example:
        >>> overlap(("negative", "row"), ("positive", "row")), overlap(("negative", "row"), ("positive", "token"))
        (False, True)
    """
    (when, sign), (other_when, other_sign) = one, other
    whens = {when, other_when}
    return bool(whens & {"any", "post_tool"}) or len(whens) == 1 or sign != other_sign
