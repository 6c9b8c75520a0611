"""Record of failures that an importer may swallow, so that `verl_patches.status()` can raise them.

verl logs a failing plugin at DEBUG and continues, and libraries catch errors of optional imports. Without this record,
only the consequences of a missing patch would be noticed.
"""

from __future__ import annotations

_recorded: list[str] = []


def record(where: str, error: BaseException) -> None:
    """Record a failure in this process, once."""
    line = f"{where}: {error}"
    if line not in _recorded:
        _recorded.append(line)


def recorded() -> list[str]:
    """Return the failures in this process, in order."""
    return list(_recorded)
