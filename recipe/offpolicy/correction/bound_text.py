"""Text of bounds, for everything that prints them: ``[0.99, 1.01]``, ``<= 2``, ``>= 0.9``, ``delta=0.1``."""

from __future__ import annotations

from collections.abc import Mapping

NOT_SET = "not set"
_DIGITS = 6


def format_bounds(bounds: Mapping[str, float | None]) -> str:
    """Format the bounds of a mask or a weight.

    Args:
        bounds: of ``lower``, ``upper``, ``delta`` and ``budget`` those that there are; None is an open side. ``delta``
            and ``budget`` say what lower and upper say, and are shown alone.

    Returns:
        The text; ``not set`` where no bound has a value.

    Example:
        >>> format_bounds({"lower": 0.99, "upper": 1.01}), format_bounds({"lower": None, "upper": 2.0})
        ('[0.99, 1.01]', '<= 2')
        >>> format_bounds({"lower": 0.904837, "upper": None, "delta": 0.1})
        'delta=0.1'
    """
    for name in ("delta", "budget"):
        if (value := bounds.get(name)) is not None:
            return f"{name}={_format_number(value)}"
    lower, upper = bounds.get("lower"), bounds.get("upper")
    if lower is not None and upper is not None:
        return f"[{_format_number(lower)}, {_format_number(upper)}]"
    if upper is not None:
        return f"<= {_format_number(upper)}"
    return NOT_SET if lower is None else f">= {_format_number(lower)}"


def _format_number(value: float) -> str:
    """Format to six digits, and more where a number close to 1 would read as 1."""
    texts = (f"{value:.{digits}g}" for digits in range(_DIGITS, 18))
    return next(text for text in texts if (float(text) == 1) == (value == 1))
