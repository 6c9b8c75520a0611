"""Any fault that disconnects the teacher stops the run at the first update with an eligible row; on a real
TrainingWorker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tensordict import TensorDict

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.opd.distillation import OnPolicyDistillation
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import take_packets
from tests.support import training_worker as tw
from tests.support.corrections import TIS
from tests.support.distilled import GATE, Batch, opinion
from tests.support.fake_teacher import FakeTeacher, serving
from verl.workers.utils.losses import ppo_loss

MODES = pytest.mark.parametrize("mode", ["advantage", "loss"])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(FakeTeacher(score=opinion)) as teacher:
        yield teacher.url


def update(
    worker: Any, url: str, mode: str, fault: Callable[[TensorDict], None] = lambda data: None, loss: Any = None
) -> dict[str, float]:
    """Run one update as the trainer does, with two eligible rows of six, and return the trainer's verdict on its
    packets.
    """
    opd = OnPolicyDistillation("opd", {"mode": mode, "teacher": {"url": url}, "eligible": GATE})
    hooks, batch = AddOns([opd]), Batch(tw.add_log_probs(worker, tw.make_rollout(6), mismatch=0.2))
    opd.begin(None)  # type: ignore[arg-type]
    try:
        hooks.on_rollout(batch)
        hooks.compute_advantages(batch, lambda: None)
    finally:
        hooks.end()
    data = batch.ship()
    fault(data)
    spec = CorrectionSpec.from_mapping({"weight": TIS})
    ours = OffPolicyLoss(spec, tw.actor_config(), extensions=hooks.worker_halves())
    metrics, _ = tw.gradients(worker, loss or ours, data, micro_batch_size=3)
    hooks.judge([packet.reports for packet in take_packets(metrics)])
    return hooks.metrics()


@MODES
def test_untouched_it_is_live(engine: Any, url: str, mode: str) -> None:
    found = update(engine, url, mode)
    assert (found["opd/live/proved"], found["opd/num_eligible_samples"]) == (1.0, 2.0)
    assert found["opd/live/error"] < 1e-4


@MODES
def test_another_loss_in_the_worker_stops_it(engine: Any, url: str, mode: str) -> None:
    with pytest.raises(LivenessError, match="opd: 0 of 0 micro-batches have no report"):
        update(engine, url, mode, loss=partial(ppo_loss, config=tw.actor_config()))
