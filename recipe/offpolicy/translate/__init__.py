"""verl's rollout correction by this package in one pass over the batch, and corrections in other frameworks' keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rollout_correction import verl_rollout_correction

__all__ = ["verl_rollout_correction"]


def __getattr__(name: str) -> Any:
    # Imported where it is asked for, so that the command beside it answers --help without torch.
    if name != "verl_rollout_correction":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .rollout_correction import verl_rollout_correction

    return verl_rollout_correction
