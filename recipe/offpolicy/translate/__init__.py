"""verl's rollout correction computed in one pass over the batch, and translation of corrections between frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rollout_correction import verl_rollout_correction

__all__ = ["verl_rollout_correction"]


def __getattr__(name: str) -> Any:
    # The import is delayed until the function is used, so that this package's command answers --help without torch.
    if name != "verl_rollout_correction":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .rollout_correction import verl_rollout_correction

    return verl_rollout_correction
