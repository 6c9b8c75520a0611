"""verl's V0 task runner with the corrected trainer in the place of ``RayPPOTrainer``."""

from __future__ import annotations

from typing import Any

import ray
from omegaconf import DictConfig

from verl_patches.trainer_v0 import task_runner

from ..fault_tolerance.redaction import redact_streams
from ..preflight.checks import demand_seams
from ..support.support_settings import SupportSettings
from .supervised_run import demand_trained
from .trainer_v0 import OffPolicyRayTrainer, install_trainer

_TaskRunner: Any = task_runner()


class OffPolicyTaskRunnerV0(_TaskRunner):
    """verl's V0 task runner; installs the trainer in its own Ray process, where verl looks it up."""

    def run(self, config: DictConfig) -> None:
        redact_streams()  # verl prints its configuration
        demand_seams(config)
        install_trainer(choose_mixin(config))
        super().run(config)
        demand_trained()


def choose_mixin(config: DictConfig) -> type[OffPolicyRayTrainer]:
    """Choose what is put in front of verl's trainer: nothing of the support where it is off."""
    if SupportSettings.from_config(config) is None:
        return OffPolicyRayTrainer
    # Other releases need not have what it is made of.
    from .support_trainer import SupportTrainerV0

    return type("SupportOffPolicyRayTrainer", (SupportTrainerV0, OffPolicyRayTrainer), {})


RemoteTaskRunner = ray.remote(num_cpus=1)(OffPolicyTaskRunnerV0)
