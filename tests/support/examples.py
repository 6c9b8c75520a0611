"""How many examples hypothesis draws."""

from __future__ import annotations

import os

VARIABLE = "OFFPOLICY_ALL_EXAMPLES"
"""Set, also by scripts/test.sh --release: every test draws all of its examples, and not a quarter of them."""


def at_most(number: int) -> int:
    """A test's examples: all of them, or a quarter for quick tests."""
    return number if os.environ.get(VARIABLE) else max(min(number, 15), number // 4)
