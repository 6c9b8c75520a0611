"""The mixins of a run's trainer: what is off is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from ..monitor.mismatch.snapshot_settings import SnapshotSettings
from ..replay.replay_settings import ReplaySettings, read_megatron_mode
from ..staleness.staleness_settings import StalenessSettings
from ..support.support_settings import SupportSettings

if TYPE_CHECKING:
    from .trainer_v0 import OffPolicyRayTrainer
    from .trainer_v1 import OffPolicyTrainer


def choose_v0(config: DictConfig) -> type[OffPolicyRayTrainer]:
    """Choose what is put in front of verl's trainer: nothing of the support where it is off."""
    from .trainer_v0 import OffPolicyRayTrainer

    if SupportSettings.from_config(config) is None:
        return OffPolicyRayTrainer
    # Other releases need not have what it is made of.
    from .support_trainer import SupportTrainerV0

    return type("SupportOffPolicyRayTrainer", (SupportTrainerV0, OffPolicyRayTrainer), {})


def choose_v1(config: DictConfig) -> type[OffPolicyTrainer]:
    """Choose what is put in front of verl's trainers: what is off is left out."""
    from .trainer_v1 import OffPolicyTrainer

    mixin: type[OffPolicyTrainer] = OffPolicyTrainer
    # Imported where asked for: 0.9.0 lacks what their buffers rely on.
    if StalenessSettings.from_config(config) is not None:
        from .bounded_trainer import BoundedTrainer

        mixin = BoundedTrainer
    if SnapshotSettings.from_config(config) is not None:
        from .snapshot_trainer import SnapshotTrainer

        mixin = type(f"Snapshot{mixin.__name__}", (SnapshotTrainer, mixin), {})
    # In front of all that choose workers, which it derives its own from.
    if ReplaySettings.from_config(config) is not None:
        from .replaying_trainer import ReplayingTrainer

        mixin = type(f"Replaying{mixin.__name__}", (ReplayingTrainer, mixin), {})
    elif read_megatron_mode(config) is not None:
        from .watching_trainer import WatchingTrainer

        mixin = type(f"Watching{mixin.__name__}", (WatchingTrainer, mixin), {})
    if SupportSettings.from_config(config) is not None:
        from .support_trainer import SupportTrainerV1

        mixin = type(f"Support{mixin.__name__}", (SupportTrainerV1, mixin), {})
    return mixin
