"""Loss, gradient and updated weights are bitwise the same with and without a forward pass for pi_old, on verl's real
engine.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.support import training_worker as tw
from tests.support.examples import each_nth_by_default
from tests.support.first_update import adapter
from tests.support.specs import GSM, STACK
from verl.workers.config import PolicyLossConfig

TIS = {"level": "token", "kind": "truncate", "lower": None, "upper": 2.0}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "weight and masks": STACK,
    "a weight on pi / mu": {"weight": TIS | {"ratio": "full"}},
    "a mask": {"masks": {"gsm": GSM}},
}


def both(worker: Any, size: int) -> dict[str, tw.Rollout]:
    """The same rows with pi_old from a forward pass, and with mu as pi_old, as a trainer sends them without a forward
    pass.
    """
    rows = tw.add_log_probs(worker, tw.make_rollout(), mismatch=0.2)
    data = rows.to_tensordict()
    # As verl's trainer asks for it: with the entropy.
    rows.old_log_probs = tw.responses(tw.forward(worker, data, size, entropy=True), data)
    without = tw.Rollout(**vars(rows))
    without.old_log_probs = rows.rollout_log_probs
    return {"recompute": rows, "reuse": without}


@pytest.mark.parametrize(
    ("name", "loss_mode", "size"),
    each_nth_by_default(3, product(CORRECTIONS, ["vanilla", "gspo"], [8, 4])),
)
def test_loss_and_gradient_are_the_same_to_the_bit(engine: Any, loss_mode: str, name: str, size: int) -> None:
    loss = PolicyLossConfig(loss_mode=loss_mode)
    seen = {
        proximal: tw.gradients(
            engine,
            adapter(CORRECTIONS[name] | {"proximal": proximal}, prove=False, policy_loss=loss),
            rows.to_tensordict(),
            micro_batch_size=size,
        )
        for proximal, rows in both(engine, size).items()
    }
    (metrics, gradient), (metrics_without, gradient_without) = seen["recompute"], seen["reuse"]
    assert metrics["loss"] == metrics_without["loss"]
    assert max(float(g.abs().max()) for g in gradient.values()) > 0
    assert tw.equal(gradient, gradient_without)
