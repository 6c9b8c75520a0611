"""A user's program on verl's V0 trainer, whose own ``fit`` calls ``compute_advantage`` and the workers directly.

It samples, keeps the half of the prompts whose rewards differ most, and updates on their rows.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from typing import Any

import hydra
import numpy as np
import ray
import torch
from omegaconf import DictConfig
from tensordict import TensorDict

from verl import DataProto
from verl.trainer import main_ppo_v0
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.trainer.ppo.reward import extract_reward
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding


class OwnTrainer(RayPPOTrainer):
    """A trainer without ``_compute_old_log_prob`` and ``_update_actor``, which updates each batch in several calls."""

    calls = 1

    def fit(self) -> None:
        self.global_steps = 0
        self._load_checkpoint()
        self.checkpoint_manager.update_weights(self.global_steps)
        for prompts in self.train_dataloader:
            self.global_steps += 1
            batch = keep_half(self.sample(DataProto.from_single_dict(prompts)))
            output = self.actor_rollout_wg.compute_log_prob(self.to_workers(batch, compute_loss=False))
            log_probs = no_padding_2_padding(tu.get(output, "log_probs"), self.to_workers(batch))
            batch.batch["old_log_probs"] = log_probs.float()
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            batch = compute_advantage(batch, adv_estimator=self.config.algorithm.adv_estimator)
            outputs = [self.update(part) for part in batch.split(len(batch) // self.calls)]
            self.checkpoint_manager.update_weights(self.global_steps)
            for output in outputs:
                metrics = reduce_metrics(tu.get(output, "metrics"))
                line = " - ".join(f"{name}:{value}" for name, value in metrics.items())
                print(f"step:{self.global_steps} - {line}", flush=True)
            if self.global_steps >= self.total_training_steps:
                return

    def update(self, batch: DataProto) -> Any:
        """Update the actor on a batch, in mini-batches of the configured size or smaller."""
        actor = self.config.actor_rollout_ref.actor
        rows = min(actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n, len(batch))
        return self.actor_rollout_wg.update_actor(
            self.to_workers(
                batch,
                compute_loss=True,
                global_batch_size=rows,
                mini_batch_size=rows,
                epochs=actor.ppo_epochs,
                seed=actor.data_loader_seed,
                dataloader_kwargs={"shuffle": actor.shuffle},
            )
        )

    def sample(self, batch: DataProto) -> DataProto:
        """Sample each prompt of a batch, with rewards."""
        n = self.config.actor_rollout_ref.rollout.n
        batch.non_tensor_batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(batch))], dtype=object)
        asked = self._get_gen_batch(batch)
        asked.meta_info["global_steps"] = self.global_steps
        answers = self.async_rollout_manager.generate_sequences(asked.repeat(repeat_times=n, interleave=True))
        self.checkpoint_manager.sleep_replicas()
        answers.meta_info.pop("timing", None)
        batch = batch.repeat(repeat_times=n, interleave=True).union(answers)
        batch.batch["token_level_scores"] = extract_reward(batch)[0]
        return batch

    def to_workers(self, batch: DataProto, **settings: Any) -> TensorDict:
        """Arrange a batch as the workers expect it."""
        batch.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        rows: TensorDict = left_right_2_no_padding(batch.to_tensordict())
        return tu.assign_non_tensor(rows, calculate_entropy=False, **settings)


def keep_half(batch: DataProto) -> DataProto:
    """Keep the half of the prompts whose rewards differ most, in their order."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        rows[uid].append(row)
    scores = batch.batch["token_level_scores"].sum(-1)
    by_contrast = sorted(rows, key=lambda uid: -float(scores[rows[uid]].std()))
    kept = sorted(row for uid in by_contrast[: len(rows) // 2] for row in rows[uid])
    return batch[torch.tensor(kept)]


@ray.remote
class Runner:
    """verl's V0 task runner with this trainer."""

    def run(self, config: DictConfig) -> None:
        main_ppo_v0.RayPPOTrainer = OwnTrainer
        main_ppo_v0.TaskRunner.__ray_metadata__.modified_class().run(config)


@hydra.main(config_path=None, version_base=None)
def main(config: DictConfig) -> None:
    run_ppo(config, Runner)


if __name__ == "__main__":
    main()
