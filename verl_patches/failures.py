"""Record of failures that an importer may swallow, so that `verl_patches.status()` can raise them.

verl logs a plugin that raises at DEBUG and carries on, and libraries try optional imports. A patch that was asked for
and is missing would then be found by its consequences alone.
"""

from __future__ import annotations

_recorded: list[str] = []


def record(where: str, error: BaseException) -> None:
    """Record a failure of this process, once however often it comes."""
    line = f"{where}: {error}"
    if line not in _recorded:
        _recorded.append(line)


def recorded() -> list[str]:
    """Return the failures of this process, in order."""
    return list(_recorded)
