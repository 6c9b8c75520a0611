"""A trainer of verl 0.7.1 whose own ``fit`` calls the legacy worker, with DataProto and the actor's own update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from tests.support import legacy_actor as la

pytestmark = [pytest.mark.verl("==0.7.1"), pytest.mark.usefixtures("legacy_patches")]
ROWS = len(la.LENGTHS)
SETTINGS = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "algorithm.adv_estimator=grpo",
    "trainer.use_legacy_worker_impl=enable",
)


@pytest.fixture
def own_trainer() -> Iterator[Callable[..., Any]]:
    """A function (option, fault, *, bypass) -> the trainer after one step."""
    from verl_patches import trainer_seams

    trainer_seams.hook_advantage()
    import verl.trainer.config
    from recipe.offpolicy.trainer.corrected_v0 import CorrectedV0
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage

    class OwnTrainer(RayPPOTrainer):
        def fit(self) -> None:
            batch = self.batch.union(self.actor_rollout_wg.compute_log_prob(self.batch))
            if self.estimates:
                batch = compute_advantage(batch, adv_estimator="grpo")
            else:
                batch.batch["advantages"] = batch.batch["token_level_rewards"]
            self.metrics = self.actor_rollout_wg.update_actor(batch).meta_info["metrics"]

    def train(options: list[str], fault: Callable[[Any], None] = lambda data: None, *, estimates: bool = True) -> Any:
        with initialize_config_dir(str(Path(verl.trainer.config.__file__).parent), version_base=None):
            config = compose("ppo_trainer", [*SETTINGS, *options])
        made: Any = object.__new__(OwnTrainer)
        made.config, made.global_steps, made.estimates = config, 1, estimates
        run: Any = CorrectedV0(made)
        run._begun = True
        actor = la.actor()

        def update(data: Any) -> Any:
            fault(data)
            return DataProto(meta_info={"metrics": actor.update_policy(data)})

        columns = la.rollout()
        forward = columns.pop("old_log_probs")
        made.batch = la.proto({name: columns[name] for name in columns if name != "advantages"})
        scores = torch.zeros(ROWS, la.WIDTH, dtype=torch.float64)
        scores[range(ROWS), [length - 1 for length in la.LENGTHS]] = torch.arange(ROWS).double() % 3 / 2
        made.batch.batch["token_level_scores"] = made.batch.batch["token_level_rewards"] = scores
        made.batch.non_tensor_batch["uid"] = np.array([f"prompt {row // 4}" for row in range(ROWS)], dtype=object)
        made.actor_rollout_wg = SimpleNamespace(
            _dispatch_info={"actor": [0]},
            compute_log_prob=lambda data: DataProto.from_dict({"old_log_probs": forward}),
            update_actor=update,
            set_loss_fn=None,
        )
        run._adopt_workers()
        made.fit()
        return made

    yield train
    trainer_seams._around.clear()
    GlobalHydra.instance().clear()


def test_its_update_is_corrected_and_proved(own_trainer: Callable[..., Any]) -> None:
    made = own_trainer(["+correction@correction=[tis_token,gsm]"])
    assert made.metrics["offpolicy/live/proved"] == 1.0
    assert made.metrics["offpolicy/live/rows"] == ROWS
    assert made.metrics["offpolicy/staleness/max"] == 0.0


def test_the_optimal_baseline_reaches_the_legacy_actor(own_trainer: Callable[..., Any]) -> None:
    made = own_trainer(["+correction@correction=gsm", "+optimal_baseline@optimal_baseline=group"])
    assert made.metrics["optimal_baseline/live/proved"] == 1.0
    assert made.metrics["optimal_baseline/live/changed_rows"] == ROWS
    assert made.metrics["offpolicy/live/proved"] == 1.0


def rows_exchanged(data: Any) -> None:
    data.batch["rollout_log_probs"] = data.batch["rollout_log_probs"].roll(1, 0)


def without_the_loss(data: Any) -> None:
    from verl_patches.legacy.handover import HANDOVER

    del data.meta_info[HANDOVER]


@pytest.mark.parametrize("fault", [rows_exchanged, without_the_loss])
def test_a_fault_behind_the_call_stops_it(fault: Any, own_trainer: Callable[..., Any]) -> None:
    from recipe.offpolicy.proof.verify import LivenessError

    with pytest.raises(LivenessError):
        own_trainer(["+correction@correction=[tis_token,gsm]"], fault)


def test_an_estimator_past_the_hook_stops_what_needs_it(own_trainer: Callable[..., Any]) -> None:
    from recipe.offpolicy.proof.verify import LivenessError

    with pytest.raises(LivenessError, match="baseline=exclude"):
        own_trainer(["+correction@correction=[gsm]", "correction.baseline=exclude"], estimates=False)
