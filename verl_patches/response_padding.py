"""Lets verl's loss accept response log-probs that are already padded.

verl slices the log-probs from the model output row by row, with three device synchronisations per row. The correction
needs padded log-probs earlier, so it pads all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .contract import wrap
from .engine_loss import Seams

CONTRACT = Seams("verl.workers.utils.losses")("no_padding_2_padding", "(tensor, data)", name="response_padding")


@dataclass(frozen=True)
class Padded:
    """Response log-probs that the patched function returns unchanged.

    Attributes:
        tensor: (B, T), the model's log-prob at each response token; differentiable.
    """

    tensor: Any


def install() -> None:
    """Wrap the target. Idempotent; later calls cost almost nothing.

    Raises:
        PatchError: the target has moved.
    """
    if not in_force():
        wrap(CONTRACT, _padded)


def in_force() -> bool:
    """Return True if the target is wrapped in this process."""
    return CONTRACT.in_force()


def _padded(target: Callable[..., Any], tensor: Any, data: Any) -> Any:
    return tensor.tensor if isinstance(tensor, Padded) else target(tensor, data)
