"""A trainer whose own ``fit`` calls the workers, with verl's own trainer, estimator and TrainingWorker."""

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
from omegaconf import DictConfig
from torch import Tensor

from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.trainer.corrected_v0 import CorrectedV0
from tests.support import training_worker as tw
from verl import DataProto
from verl.workers.utils.losses import ppo_loss

pytestmark = pytest.mark.verl(">=0.9")

N, ROWS = 4, 128
SETTINGS = (
    "actor_rollout_ref.rollout.name=vllm",
    f"actor_rollout_ref.rollout.n={N}",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",  # prompts: half of the 32 are kept
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "algorithm.adv_estimator=grpo",
    "trainer.resume_mode=disable",
)


def composed(*options: str) -> DictConfig:
    import verl.trainer.config

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(verl.trainer.config.__file__).parent), version_base=None):
        return compose("ppo_trainer", [*SETTINGS, *options])


@pytest.fixture
def own_fit() -> Iterator[Any]:
    """The module of the user's trainer, which imports ``compute_advantage`` by name."""
    from verl_patches import trainer_seams

    trainer_seams.hook_advantage()
    from tests.support import own_fit as module

    yield module
    trainer_seams._around.clear()
    GlobalHydra.instance().clear()


def padded(rows: list[Tensor], left: bool = False) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left" if left else "right")


def sampled(worker: Any) -> Any:
    """A batch as verl's rollout returns it, with mu close to the worker's own log-probs."""
    rollout = tw.add_log_probs(worker, tw.make_rollout(ROWS, tool_tokens=False), mismatch=0.2)
    prompts = padded(rollout.prompts, left=True)
    sides = (rollout.prompts, True), (rollout.responses, False)
    attention = torch.cat([padded([torch.ones_like(row) for row in rows], left) for rows, left in sides], -1)
    responses = padded(rollout.responses)
    scores = torch.zeros(responses.shape)
    scores[range(ROWS), [len(row) - 1 for row in rollout.responses]] = torch.arange(ROWS) % 3 / 2.0
    batch = DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], -1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": padded(rollout.response_mask),
            "rollout_log_probs": padded(rollout.rollout_log_probs).clamp(max=0.0),
            "token_level_scores": scores,
        }
    )
    batch.non_tensor_batch["uid"] = np.array([f"prompt {row // N}" for row in range(ROWS)], dtype=object)
    return batch


class Group(SimpleNamespace):
    """A worker group with one worker, and with a fault in the data that it receives."""

    def __init__(self, worker: Any, fault: Callable[[Any, Any], None]) -> None:
        def update(rows: Any) -> Any:
            fault(worker, rows)
            return worker.train_mini_batch(rows)

        def forward(rows: Any) -> Any:
            worker.engine_config.infer_micro_batch_size_per_gpu = len(rows)
            return worker.infer_batch(rows)

        self._dispatch_info = {"actor": [0]}
        worker.engine_config.use_dynamic_bsz = False
        worker.engine_config.micro_batch_size_per_gpu = 8
        super().__init__(compute_log_prob=forward, set_loss_fn=worker.set_loss_fn, update_actor=update)


def trained(
    own_fit: Any,
    worker: Any,
    config: DictConfig,
    fault: Callable[[Any, Any], None],
    spoil: Callable[[Any], None] = lambda batch: None,
) -> Any:
    """Run one step of the user's trainer; ``spoil`` modifies the rollout."""
    made: Any = object.__new__(own_fit.OwnTrainer)
    made.config, made.total_training_steps = config, 1
    made.corrected = run = CorrectedV0(made)
    run._begun = True
    made.actor_rollout_wg = Group(worker, fault)
    made.checkpoint_manager = SimpleNamespace(update_weights=lambda step: None)
    made.train_dataloader = [{"input_ids": torch.zeros(1, 1)}]

    def sample(prompts: Any) -> Any:
        batch = sampled(worker)
        spoil(batch)
        return batch

    made.sample = sample
    run._adopt_workers()
    made.fit()
    return made


def nothing(worker: Any, rows: Any) -> None: ...


@pytest.mark.parametrize("option", ["[tis_token,gsm]", "bypass"])
def test_its_update_is_corrected_and_proved(option: str, own_fit: Any, engine: Any, capsys: Any) -> None:
    made = trained(own_fit, engine, composed(f"+correction@correction={option}"), nothing)
    assert made.corrected.supervision.proving is False
    step = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step:1"))
    assert "offpolicy/live/proved:1.0" in step
    assert "offpolicy/live/rows:64.0" in step
    assert "offpolicy/staleness/max:0.0" in step


@pytest.mark.parametrize("options", [["bypass"], ["[gsm]", "correction.baseline=exclude"]])
def test_a_batch_that_is_updated_in_two_calls_stops_with_the_reason(
    options: list[str], own_fit: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_fit.OwnTrainer, "calls", 2)
    config = composed(f"+correction@correction={options[0]}", *options[1:])
    with pytest.raises(LivenessError, match=r"used 32 of the 64 sequences.* to one call of update_actor"):
        trained(own_fit, engine, config, nothing)


def other_loss(worker: Any, rows: Any) -> None:
    from functools import partial

    worker.set_loss_fn(partial(ppo_loss, config=tw.actor_config()))


def rows_exchanged(worker: Any, rows: Any) -> None:
    rows["rollout_log_probs"] = rows["rollout_log_probs"].roll(1, 0)


@pytest.mark.parametrize("fault", [other_loss, rows_exchanged])
def test_a_fault_behind_the_call_stops_it(fault: Any, own_fit: Any, engine: Any) -> None:
    with pytest.raises(LivenessError):
        trained(own_fit, engine, composed("+correction@correction=[tis_token,gsm]"), fault)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["[gsm]", "correction.baseline=exclude"], "baseline=exclude"),
        (["same_engine"], "same_engine"),
    ],
)
def test_what_needs_a_method_that_it_goes_past_stops_it(
    options: list[str], says: str, own_fit: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import inspect

    monkeypatch.setattr(own_fit, "compute_advantage", inspect.unwrap(own_fit.compute_advantage))
    config = composed(f"+correction@correction={options[0]}", *options[1:])
    with pytest.raises(LivenessError, match=says):
        trained(own_fit, engine, config, nothing)
