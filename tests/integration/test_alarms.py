"""Fallbacks and moving bounds on a real verl TrainingWorker: they reach the gradient, are proved, and are equal on all
ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict

from recipe.offpolicy.batch.plan import PLAN, SharedPlan, compute_constants
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.spec import compute_fingerprint, read_bounds, replace_bounds
from recipe.offpolicy.monitor.alarm_settings import DEFAULTS as ALARMS
from recipe.offpolicy.proof.verify import LivenessError, verify, verify_update
from recipe.offpolicy.trainer.supervision import Supervision
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import Packet, take_packets
from tests.support import training_worker as tw
from tests.support.first_update import acting_by
from tests.support.sampled_rows import compute_sampled_checksums
from tests.support.specs import GSM, OPSM, TIS_TOKEN
from verl.utils import tensordict_utils as tu

BANDED = CorrectionSpec.from_mapping({"masks": {"gsm": GSM, "opsm": OPSM}})
MOVED: dict[str, dict[str, float | None]] = {"gsm": {"lower": 0.97, "upper": 1.04}, "opsm": {"delta": 0.02}}
SAFER = CorrectionSpec.from_mapping({"weight": TIS_TOKEN})


def config(**offpolicy: Any) -> DictConfig:
    """The part of a configuration that a Supervision reads."""
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {"ppo_epochs": 1}},
            "offpolicy": {"allow_identical_log_probs": False, "allow_unrelated_log_probs": False} | offpolicy,
        }
    )


def alarms(**ess: Any) -> dict[str, Any]:
    """Alarms that are all off, except the ESS alarm, which any mismatch triggers unless its keys say otherwise."""
    values = {"action": "warn", "lower": 0.9999, "recovery_lower": 0.9999, "patience": 1, "recovery_patience": 1}
    return {"alarms": {name: {"action": "off"} for name in ALARMS} | {"ess": values | ess}}


class Run:
    """The trainer's part of a run: it sends the loss and the plans, and judges the workers' reports."""

    def __init__(self, engine: Any, spec: CorrectionSpec, **offpolicy: Any) -> None:
        self.engine = engine
        self.supervision = Supervision(spec, config(**offpolicy))
        self.loss = self.handed_over()

    def handed_over(self) -> Any:
        active = self.supervision.active_correction
        return OffPolicyLoss(active.spec, tw.actor_config(), prove=self.supervision.proving, moving=active.moving)

    def update(self, mismatch: float = 0.2, *, seed: int = 1) -> dict[str, torch.Tensor]:
        """Run one update with a new rollout, in micro-batches of two rows; the optimizer does not step."""
        rows = tw.add_log_probs(self.engine, tw.make_rollout(), mismatch=mismatch, seed=seed)
        self.supervision.sampled(rows.to_tensordict())
        self.supervision.begin()
        sent = with_bounds(rows.to_tensordict(), self.supervision.active_correction.bounds, self.supervision.spec)
        metrics, gradient = tw.gradients(self.engine, self.loss, sent, micro_batch_size=2)
        if self.supervision.collect(metrics):
            self.loss = self.handed_over()
        return gradient

    @property
    def metrics(self) -> dict[str, float]:
        return self.supervision.metrics()


def with_bounds(data: TensorDict, bounds: Any, spec: CorrectionSpec | None = None) -> TensorDict:
    """The batch with a plan that contains these bounds, and the batch constants of ``spec`` for these bounds."""
    tu.assign_non_tensor(
        data, **{PLAN: SharedPlan(1, compute_constants(spec or CorrectionSpec(), data), bounds=bounds)}
    )
    return data


def rollout(engine: Any, mismatch: float = 0.05) -> tw.Rollout:
    return tw.add_log_probs(engine, tw.make_rollout(), mismatch=mismatch)


# Moving bounds ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moving:
    """A correction with moving bounds, the bounds of an update's plan, and bounds that arrive too late."""

    spec: CorrectionSpec
    sides: Any
    moved: Any
    late: Any

    def loss(self, kind: type = OffPolicyLoss, **changes: Any) -> Any:
        return kind(self.spec, tw.actor_config(), moving=self.sides, **changes)

    def fixed(self, bounds: Any) -> Any:
        """The loss of a correction that is configured with these bounds."""
        return OffPolicyLoss(replace_bounds(self.spec, bounds), tw.actor_config())

    def verify(self, packets: list[Packet], rows: tw.Rollout) -> dict[str, float]:
        sampled = compute_sampled_checksums(rows.to_tensordict())
        return verify(packets, replace_bounds(self.spec, self.moved), sampled_rows=sampled, moving=self.sides)


BANDS = Moving(BANDED, {"gsm": "both", "opsm": "both"}, MOVED, MOVED | {"opsm": {"delta": 0.021}})
CAP = Moving(
    CorrectionSpec.from_mapping({"weight": TIS_TOKEN, "masks": {"gsm": GSM}}),
    {"correction.weight": "upper"},
    {"correction.weight": {"upper": 1.05}},
    {"correction.weight": {"upper": 1.06}},
)
both = pytest.mark.parametrize("moving", [BANDS, CAP], ids=["bands", "cap"])


@both
def test_the_bounds_of_the_plan_reach_the_gradient_and_are_proved(engine: Any, moving: Moving) -> None:
    rows = rollout(engine, 0.2 if moving is CAP else 0.05)
    _, expected = tw.gradients(engine, moving.fixed(moving.moved), rows.to_tensordict(), micro_batch_size=2)
    _, configured = tw.gradients(engine, moving.fixed({}), rows.to_tensordict())
    data = with_bounds(rows.to_tensordict(), moving.moved)
    metrics, gradient = tw.gradients(engine, moving.loss(prove=True), data, micro_batch_size=2)
    assert tw.equal(gradient, expected)
    assert not tw.equal(gradient, configured)
    packets = take_packets(metrics)
    assert [packet.bounds for packet in packets] == [moving.moved] * 4
    live = moving.verify(packets, rows)
    assert (live["proved"], live["parts"]) == (1.0, 2.0)
    assert live["fingerprint"] == compute_fingerprint(moving.spec, moving.sides) != moving.spec.fingerprint()
    # And back: nothing of an update is left for the next.
    back = read_bounds(moving.spec, moving.moved)
    _, gradient = tw.gradients(engine, moving.loss(), with_bounds(rows.to_tensordict(), back))
    assert tw.equal(gradient, configured)


@both
def test_a_loss_that_goes_past_the_moved_bounds_is_not_proved(engine: Any, moving: Moving) -> None:
    """The loss reports the moved bounds, but applies the initial bounds."""
    rows = rollout(engine, 0.2 if moving is CAP else 0.05)
    data = with_bounds(rows.to_tensordict(), moving.moved)
    metrics, _ = tw.gradients(engine, moving.loss(acting_by(moving.spec), prove=True), data)
    with pytest.raises(LivenessError, match=r"gradient|has no effect"):
        moving.verify(take_packets(metrics), rows)


@both
def test_a_rank_with_other_bounds_stops_the_run(engine: Any, moving: Moving) -> None:
    rows = rollout(engine)
    sampled = compute_sampled_checksums(rows.to_tensordict())
    spec = replace_bounds(moving.spec, moving.moved)

    def of_ranks(*bounds: Any) -> list[Packet]:
        packets: list[Packet] = []
        for part, sent in zip(rows.to_tensordict().chunk(2), bounds, strict=True):
            metrics, _ = tw.gradients(engine, moving.loss(), with_bounds(part, sent), micro_batch_size=2)
            packets += take_packets(metrics)
        return packets

    verify_update(of_ranks(moving.moved, moving.moved), spec, sampled_rows=sampled, moving=moving.sides)
    with pytest.raises(LivenessError, match=r"but the trainer sent"):
        verify_update(of_ranks(moving.moved, moving.late), spec, sampled_rows=sampled, moving=moving.sides)


def test_a_plan_that_did_not_arrive_stops_before_the_gradient(engine: Any) -> None:
    data = rollout(engine).to_tensordict()
    with pytest.raises(KeyError, match="offpolicy_plan is not in the micro-batch"):
        tw.gradients(engine, BANDS.loss(), data)
    with pytest.raises(KeyError, match="contains bounds for"):
        tw.gradients(engine, BANDS.loss(), with_bounds(data, {"gsm": MOVED["gsm"]}))


# Fallbacks --------------------------------------------------------------------------------------------------

FALLBACK = {"action": "fallback", "fallback": {"options": ["tis_token"], "correction": SAFER.to_mapping()}}


def test_a_fallback_reaches_the_gradient_and_is_proved_there(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(engine, BANDED, **alarms(**FALLBACK, return_after=1))
    with caplog.at_level(logging.INFO):
        run.update()
    assert "masks.gsm, masks.opsm LIVE" in caplog.text
    assert run.supervision.spec == SAFER
    assert run.supervision.proving
    caplog.clear()
    with caplog.at_level(logging.INFO):
        gradient = run.update(0.2)
    assert "weight LIVE in the gradient" in caplog.text
    rows = tw.add_log_probs(engine, tw.make_rollout(), mismatch=0.2)
    plain = OffPolicyLoss(SAFER, tw.actor_config())
    assert tw.equal(gradient, tw.gradients(engine, plain, rows.to_tensordict(), micro_batch_size=2)[1])
    assert run.metrics["offpolicy/alarm/active_correction"] == 1.0
    # Equal engines: the weights' ESS is 1, the alarm is quiet, and the configured correction is proved again.
    run.update(1e-6)
    assert run.supervision.spec == BANDED
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run.update(1e-6)
    assert "masks.gsm, masks.opsm LIVE" in caplog.text
    assert run.metrics["offpolicy/alarm/active_correction"] == 0.0


def test_a_fallback_that_does_not_act_stops_the_run(engine: Any) -> None:
    """The worker has the right spec, but its loss ignores the weight."""
    run = Run(engine, BANDED, **alarms(**FALLBACK))
    run.update()
    base = run.loss.base_loss
    run.loss.base_loss = lambda output, data, *rest: base(
        output, data.exclude("rollout_is_weights", inplace=False), *rest
    )
    with pytest.raises(LivenessError):
        run.update()
