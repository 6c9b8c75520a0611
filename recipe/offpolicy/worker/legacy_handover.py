"""Handover of the correction to verl's legacy actors, in the ``meta_info`` of each batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..extensions.add_on import WorkerExtension
from .legacy_settings import LegacySettings

if TYPE_CHECKING:
    from .legacy_loss import LegacyUpdate


class Handover(LegacySettings):
    """The settings in the form in which they are sent; implements ``verl_patches.legacy.handover.LegacyHandover``."""

    @property
    def reads_rollout_log_probs(self) -> bool:
        return self.ours

    def update(self, actor_config: Any, *, dp_size: int, upstream: Callable[[], float]) -> LegacyUpdate:
        # Imported on use, in the worker, because ``legacy_loss`` imports verl's losses.
        from .legacy_loss import LegacyUpdate

        return LegacyUpdate(self, actor_config, dp_size=dp_size, upstream=upstream)


@dataclass(frozen=True)
class ExtendedHandover(Handover):
    """A handover that also contains the worker parts of extensions, by section."""

    extensions: Mapping[str, WorkerExtension] = field(default_factory=dict)  # type: ignore[misc]


def build_handover(*arguments: Any, extensions: Mapping[str, WorkerExtension], **fields: Any) -> Handover:
    """Build a handover from these fields, in its extended form if there are extensions."""
    if not extensions:
        return Handover(*arguments, **fields)
    return ExtendedHandover(*arguments, extensions=extensions, **fields)  # type: ignore[misc]
