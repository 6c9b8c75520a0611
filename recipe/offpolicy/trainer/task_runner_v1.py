"""verl's V1 task runner with the corrected trainers under verl's own mode names."""

from __future__ import annotations

from typing import Any

import ray
from omegaconf import DictConfig
from verl.trainer.main_ppo import TaskRunnerV1

from ..fault_tolerance.redaction import redact_streams
from ..monitor.mismatch.snapshot_settings import SnapshotSettings
from ..preflight.checks import demand_seams
from ..replay.replay_settings import ReplaySettings, read_megatron_mode
from ..staleness.staleness_settings import StalenessSettings
from ..support.support_settings import SupportSettings
from .supervised_run import demand_trained
from .trainer_v1 import OffPolicyTrainer, install_trainers

# Ray wraps a class into an actor class that cannot be subclassed; the class itself is kept in its metadata.
_TaskRunner: Any = TaskRunnerV1.__ray_metadata__.modified_class


class OffPolicyTaskRunnerV1(_TaskRunner):
    """verl's V1 task runner; installs the trainers in its own Ray process, where verl looks them up."""

    def run(self, config: DictConfig) -> None:
        redact_streams()  # verl prints its configuration
        demand_seams(config)
        install_trainers(config.trainer.v1.trainer_mode, choose_mixin(config))
        super().run(config)
        demand_trained()


def choose_mixin(config: DictConfig) -> type[OffPolicyTrainer]:
    """Choose what is put in front of verl's trainers: what is off is left out."""
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


RemoteTaskRunner = ray.remote(OffPolicyTaskRunnerV1)
