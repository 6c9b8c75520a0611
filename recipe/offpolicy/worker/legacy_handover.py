"""Handover of the correction to verl's legacy actors, with each batch, in ``meta_info``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..extensions.extension import WorkerExtension
from .legacy_settings import LegacySettings

if TYPE_CHECKING:
    from .legacy_loss import LegacyUpdate


class Handover(LegacySettings):
    """These settings as they travel: what ``verl_patches.legacy`` calls a ``LegacyHandover``."""

    @property
    def reads_rollout_log_probs(self) -> bool:
        return self.ours

    def update(self, actor_config: Any, *, dp_size: int, upstream: Callable[[], float]) -> LegacyUpdate:
        # Imported where it is used, in the worker: it imports verl's losses.
        from .legacy_loss import LegacyUpdate

        return LegacyUpdate(self, actor_config, dp_size=dp_size, upstream=upstream)


@dataclass(frozen=True)
class ExtendedHandover(Handover):
    """A handover with the workers' halves of extensions, by section."""

    extensions: Mapping[str, WorkerExtension] = field(default_factory=dict)  # type: ignore[misc]


def build_handover(*arguments: Any, extensions: Mapping[str, WorkerExtension], **fields: Any) -> Handover:
    """Make a handover of these fields, extended where there is something to extend it with."""
    if not extensions:
        return Handover(*arguments, **fields)
    return ExtendedHandover(*arguments, extensions=extensions, **fields)  # type: ignore[misc]
