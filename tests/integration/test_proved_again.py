"""Faults that begin after the first update stop the run at the next proof at the latest; on a real verl
TrainingWorker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from recipe.offpolicy.batch.plan import PLAN, SharedPlan
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.trainer.supervision import Supervision
from recipe.offpolicy.worker.loss import OffPolicyLoss
from tests.support import training_worker as tw
from tests.support.examples import each_nth_by_default
from tests.support.specs import GSM, OPSM, STALENESS, TIS_TOKEN
from verl.utils import tensordict_utils as tu

SPEC = {"weight": TIS_TOKEN, "masks": {"gsm": GSM, "opsm": OPSM, "staleness": STALENESS}}
EVERY = 2
SAID = r"scaled it by zero|times the expected factor|not weight \* keep|has no effect|returned no metrics"


class Trainer:
    """The trainer's part of a run: plans, marks, and the verdict on each update."""

    def __init__(self, engine: Any, **keys: Any) -> None:
        allowed = {"allow_identical_log_probs": False, "allow_unrelated_log_probs": False}
        config = OmegaConf.create(
            {"actor_rollout_ref": {"actor": {"ppo_epochs": 1}}, "offpolicy": allowed | {"prove_every": EVERY} | keys}
        )
        spec = CorrectionSpec.from_mapping(SPEC)
        self.engine, self.supervision, self.step = engine, Supervision(spec, config), 0
        self.loss = OffPolicyLoss(spec, tw.actor_config())

    def update(self, *, advantage: float | None = None, **dealt: Any) -> int:
        """Run one update with a new rollout, and return the rows whose micro-batches were proved."""
        self.step += 1
        self.engine.engine_config.use_dynamic_bsz = False
        rows = tw.add_log_probs(self.engine, tw.make_rollout(seed=self.step), mismatch=0.2, seed=self.step)
        if advantage is not None:
            rows.advantages = [torch.full_like(row, advantage) for row in rows.advantages]
        data = rows.to_tensordict()
        self.supervision.sampled(data)
        self.supervision.begin()
        plan, marks = self.supervision.mark_proof(SharedPlan(self.step), lambda: data["response_mask"], lambda: 1)
        for name, column in marks.items():
            data[name] = column
        tu.assign_non_tensor(data, **{PLAN: plan})
        metrics, _ = tw.gradients(self.engine, self.loss, data, **({"micro_batch_size": 2} | dealt))
        self.supervision.collect(metrics)
        return sum(int((column > 0).sum()) for column in marks.values())


@pytest.mark.parametrize(
    "dealt",
    each_nth_by_default(2, [{"max_token_len": 24}, {"micro_batch_size": 1}, {"mini_batches": 2}, {}]),
    ids=str,
)
def test_a_healthy_run_is_proved_at_regular_updates(engine: Any, dealt: dict[str, Any]) -> None:
    trainer = Trainer(engine)
    # All eight rows, of some 40 tokens, at first; then one row every second update.
    assert [trainer.update(**dealt) for _ in range(6)] == [8, 0, 1, 0, 1, 0]


def test_an_update_that_shows_nothing_is_made_up_for(engine: Any) -> None:
    trainer = Trainer(engine)
    assert [trainer.update(advantage=0.0 if step in (0, 3) else None) for step in range(6)] == [8, 8, 0, 1, 1, 0]


def instead(change: Callable[[Any, Any], Any]) -> Callable[[Trainer, pytest.MonkeyPatch], None]:
    """Pass weights to verl's loss that differ from those that the correction computed."""

    def install(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
        hand_over = OffPolicyLoss.hand_over

        def changed(loss: Any, batch: Any, step: Any) -> Any:
            data = hand_over(loss, batch, step)
            data["rollout_is_weights"] = change(data["rollout_is_weights"], batch)
            return data

        monkeypatch.setattr(OffPolicyLoss, "hand_over", changed)

    return install


def scaled(factor: float) -> Callable[[Trainer, pytest.MonkeyPatch], None]:
    """Scale the loss in the engine, between our loss and the backward pass."""

    def install(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = trainer.engine.engine
        forward_step = type(engine).forward_step

        def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
            loss, output = forward_step(self, *args, **kwargs)
            return (loss * factor if loss.requires_grad else loss), output

        monkeypatch.setattr(type(engine), "forward_step", changed)

    return install


def plain_loss(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.loss = trainer.loss.verl_loss


def other_gradient(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    call = OffPolicyLoss.__call__

    def changed(loss: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        return loss.verl_loss(model_output, data)[0], call(loss, model_output, data, dp_group)[1]

    monkeypatch.setattr(OffPolicyLoss, "__call__", changed)


AT_ONCE: dict[str, Any] = {
    "loss x0.5": scaled(0.5),
    "loss x0": scaled(0.0),
    "verl's loss, and our packets": other_gradient,
    "verl's loss": plain_loss,
}
LATER: dict[str, Any] = {
    "weights of one": instead(lambda weights, batch: torch.ones_like(weights)),
    "weights of other rows": instead(lambda weights, batch: weights.roll(1, 0)),
    "weights without masks": instead(lambda weights, batch: weights.clamp(min=0.5)),
}


@pytest.mark.parametrize("name", [*AT_ONCE, *LATER])
def test_faults_after_the_first_update(engine: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(engine)
    trainer.update()
    (AT_ONCE | LATER)[name](trainer, monkeypatch)
    quiet = 0 if name in AT_ONCE else EVERY - 1
    for _ in range(quiet):
        trainer.update()
    with pytest.raises(LivenessError, match=SAID):
        trainer.update()


def test_marks_that_do_not_arrive(engine: Any) -> None:
    trainer = Trainer(engine)
    trainer.supervision.mark_proof, mark = (  # type: ignore[method-assign]
        lambda *given: (mark(*given)[0], {}),
        trainer.supervision.mark_proof,
    )
    with pytest.raises(LivenessError, match="add up to 0 instead of 9"):
        trainer.update()
