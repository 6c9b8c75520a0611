"""Loss, gradient and updated weights with and without a forward pass for pi_old, on verl's real engine: to the bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec
from tests.support import training_worker as tw
from tests.support.examples import each_nth_by_default
from tests.support.specs import GSM, STACK

TIS = {"level": "token", "kind": "truncate", "lower": None, "upper": 2.0}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "weight and masks": STACK,
    "a weight on pi / mu": {"weight": TIS | {"ratio": "full"}},
    "a mask": {"masks": {"gsm": GSM}},
}


def our_loss(mapping: dict[str, Any], config: Any) -> Any:
    from recipe.offpolicy.worker.loss import OffPolicyLoss

    return OffPolicyLoss(CorrectionSpec.from_mapping(mapping), config)


def scored(worker: Any, rows: tw.Rollout, size: int) -> list[Tensor]:
    """log pi_old as verl's trainer asks for it: with the entropy, in micro-batches of ``size``."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    data = rows.to_tensordict()
    worker.engine_config.use_dynamic_bsz = False
    worker.engine_config.infer_micro_batch_size_per_gpu = size
    tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False, temperature=1.0, global_token_num=None)
    return list(response_from_nested(worker.infer_batch(data)["log_probs"], data["response_mask"]).unbind())


def both(worker: Any, size: int) -> dict[str, tw.Rollout]:
    """The same rows with pi_old of a forward pass, and with mu in its place, as a trainer sends them without one."""
    rows = tw.add_log_probs(worker, tw.make_rollout(), mismatch=0.2)
    rows.old_log_probs = scored(worker, rows, size)
    without = tw.Rollout(**vars(rows))
    without.old_log_probs = rows.rollout_log_probs
    return {"recompute": rows, "reuse": without}


@pytest.mark.parametrize(
    ("name", "loss_mode", "size"),
    each_nth_by_default(3, product(CORRECTIONS, ["vanilla", "gspo"], [8, 4])),
)
def test_loss_and_gradient_are_the_same_to_the_bit(engine: Any, loss_mode: str, name: str, size: int) -> None:
    from verl.workers.config import PolicyLossConfig

    config = tw.actor_config(policy_loss=PolicyLossConfig(loss_mode=loss_mode))
    seen = {
        proximal: tw.gradients(
            engine,
            our_loss(CORRECTIONS[name] | {"proximal": proximal}, config),
            rows.to_tensordict(),
            micro_batch_size=size,
        )
        for proximal, rows in both(engine, size).items()
    }
    (metrics, gradient), (metrics_without, gradient_without) = seen["recompute"], seen["reuse"]
    assert metrics["loss"] == metrics_without["loss"]
    assert max(float(g.abs().max()) for g in gradient.values()) > 0
    assert tw.equal(gradient, gradient_without)
