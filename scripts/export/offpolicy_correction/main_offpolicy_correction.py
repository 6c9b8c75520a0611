"""verl's PPO training with a correction: ``python3 -m recipe.offpolicy_correction.main_offpolicy_correction ...``.

This program accepts every override of ``verl.trainer.main_ppo``, and the group ``correction``: ``correction=gsm``, or
several options, ``'correction=[tis_token,gsm]'``.
"""

from __future__ import annotations

import json
from typing import Any

import hydra
import ray
from omegaconf import DictConfig, OmegaConf

from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.device import auto_set_device

from .check import NotLive
from .correction import Correction
from .loss import PREFIX, CorrectedLoss


class CorrectedTrainer:
    """Mixin for a V1 trainer: sets the loss of the actor's workers, and stops if an update did not use this loss."""

    def _setup(self) -> None:
        super()._setup()
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(CorrectedLoss(read_correction(self.config), actor))

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._update_actor(batch, metrics)
        for name in [name for name in metrics if name.startswith(f"actor/{PREFIX}/")]:
            metrics[name.removeprefix("actor/")] = metrics.pop(name)
        if f"{PREFIX}/live/tokens" not in metrics:
            raise NotLive("the workers did not use the corrected loss, so this update was uncorrected.")
        squares = metrics.pop(f"{PREFIX}/weight_square")
        if squares > 0:
            metrics[f"{PREFIX}/weight/ess"] = metrics[f"{PREFIX}/weight"] ** 2 / squares
        return batch


@ray.remote
class CorrectedTaskRunner(TaskRunnerV1.__ray_actor_class__):
    """verl's task runner, with a corrected trainer."""

    def run(self, config: DictConfig) -> None:
        mode = config.trainer.v1.trainer_mode
        base = trainer_base.get_trainer_cls(mode)
        trainer_base.TRAINER_REGISTRY[mode] = type(f"Corrected{base.__name__}", (CorrectedTrainer, base), {})
        super().run(config)


def read_correction(config: DictConfig) -> Correction:
    """Read the correction of a configuration.

    Raises:
        ValueError: the correction is invalid, or another option would make it ineffective.
    """
    correction = Correction.from_config(OmegaConf.to_container(config.correction, throw_on_missing=True))
    needed = {
        "trainer.use_v1": True,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "algorithm.rollout_correction.rollout_is": None,
        "algorithm.rollout_correction.rollout_rs": None,
        "algorithm.rollout_correction.bypass_mode": False,
        "actor_rollout_ref.rollout.top_p": 1,
    }
    for key, value in needed.items():
        if (found := OmegaConf.select(config, key, default=value)) != value:
            raise ValueError(f"{key}={found} makes the correction ineffective or wrong. Set {key}={json.dumps(value)}.")
    return correction


@hydra.main(config_path="config", config_name="offpolicy_correction_trainer", version_base=None)
def main(config: DictConfig) -> None:
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    read_correction(config)
    run_ppo(config, task_runner_class=CorrectedTaskRunner)


if __name__ == "__main__":
    main()
