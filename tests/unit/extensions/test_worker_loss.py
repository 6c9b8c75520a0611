"""Terms and reports of extensions in the worker's loss, on a nested micro-batch as the V1 trainer ships it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.batch.plan import PLAN, SharedPlan
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.add_on import BoundLoss, WorkerExtension
from recipe.offpolicy.proof.verify import LivenessError, verify
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import METRIC_KEY, Packet, take_packets
from tests.support import training_worker as tw
from tests.support.corrections import TIS
from tests.support.distilled import rollout
from tests.support.nudge import NudgeWorker
from tests.support.sampled_rows import compute_sampled_checksums
from verl.utils import tensordict_utils as tu

CORRECTIONS = {"none": CorrectionSpec(), "tis": CorrectionSpec.from_mapping({"weight": TIS})}
COLUMN = "offpolicy_nudge"


def micro_batch() -> tuple[dict[str, Tensor], TensorDict]:
    """Five rows and one padding row; mu and pi are close to pi_old."""
    made, flat, whole = rollout()
    made.response_mask[5] = torch.zeros_like(made.response_mask[5])
    made.old_log_probs = [row + 0.05 * torch.arange(len(row)).sin() for row in made.old_log_probs]
    data = made.to_tensordict()
    data[COLUMN] = 1.0 * data["response_mask"]
    tokens = int(data["response_mask"].values().sum())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=6, **{PLAN: SharedPlan(1)})
    offsets = torch.tensor([0, *whole]).cumsum(0)
    return {"log_probs": torch.nested.nested_tensor_from_jagged(flat.clone().requires_grad_(), offsets)}, data


def loss_of(spec: CorrectionSpec, extensions: dict[str, WorkerExtension], *, prove: bool = False) -> OffPolicyLoss:
    return OffPolicyLoss(spec, tw.actor_config(), prove=prove, extensions=extensions)


def run(loss: OffPolicyLoss) -> tuple[Tensor, Packet]:
    value, metrics = loss(*micro_batch())
    value.backward()
    (packet,) = take_packets({METRIC_KEY: metrics[METRIC_KEY]})
    return value.detach(), packet


@pytest.mark.parametrize("name", CORRECTIONS)
def test_terms_of_two_extensions_add_up(name: str) -> None:
    """Each extension adds coef x the mean of -log pi x weight over response tokens."""
    spec = CORRECTIONS[name]
    plain, _ = run(loss_of(spec, {}))
    both, packet = run(loss_of(spec, {"one": NudgeWorker(COLUMN, 0.125), "two": NudgeWorker(COLUMN, 0.5)}))
    output, data = micro_batch()
    terms = []
    for place, row in enumerate(output["log_probs"].unbind()):
        pi = row[len(data["prompts"][place]) - 1 : -1].detach()
        ratio = (data["old_log_probs"][place] - data["rollout_log_probs"][place]).exp().clamp(max=TIS["upper"])
        weight = ratio if name == "tis" else torch.ones_like(pi)
        terms.append((-pi * weight)[data["response_mask"][place].bool()])
    torch.testing.assert_close(both - plain, 0.625 * torch.cat(terms).mean())
    tokens = float(data["response_mask"].values().sum())
    assert packet.reports == {"one": (5, tokens), "two": (5, tokens)}


def verdict(loss: OffPolicyLoss) -> dict[str, float]:
    _, packet = run(loss)
    return verify([packet], loss.spec, sampled_rows=compute_sampled_checksums(micro_batch()[1]))


def test_a_correction_is_proved_live_beside_a_term_that_its_weights_multiply() -> None:
    plain = verdict(loss_of(CORRECTIONS["tis"], {}, prove=True))
    alongside = verdict(loss_of(CORRECTIONS["tis"], {"one": NudgeWorker(COLUMN, 0.125)}, prove=True))
    assert alongside["proved"] == 1.0
    assert alongside["gradient_tokens"] == plain["gradient_tokens"]


class OwnWeights(NudgeWorker):
    """An extension that passes ones to the base loss instead of weight x keep, and multiplies weight x keep only into
    its own term.
    """

    def wrap_loss(self, base_loss: BoundLoss, actor_config: Any) -> BoundLoss:
        def uncorrected(model_output: Any, data: Any, dp_group: Any = None) -> Any:
            plain = data.copy()
            plain["rollout_is_weights"] = torch.ones_like(data["rollout_is_weights"])
            return base_loss(model_output, plain, dp_group)

        return super().wrap_loss(uncorrected, actor_config)


class Nothing(WorkerExtension):
    """An extension that does not use verl's loss."""

    def wrap_loss(self, base_loss: BoundLoss, actor_config: Any) -> BoundLoss:
        return lambda model_output, data, dp_group=None: (0.0 * model_output["log_probs"].values().sum(), {})


@pytest.mark.parametrize("extension", [Nothing(), OwnWeights(COLUMN, 0.125)])
def test_an_extension_that_takes_the_correction_from_the_base_loss_stops_the_run(extension: WorkerExtension) -> None:
    loss = loss_of(CORRECTIONS["tis"], {"one": extension}, prove=True)
    loss.takes_padded = False
    with pytest.raises(LivenessError, match="plus extension terms"):
        verdict(loss)


class Dead(OffPolicyLoss):
    """An extension that never passes on its weights."""

    def hand_over(self, *args: Any) -> TensorDict:
        handed = super().hand_over(*args)
        handed["rollout_is_weights"] = torch.ones_like(handed["rollout_is_weights"])
        return handed


def test_a_term_does_not_hide_a_dead_correction() -> None:
    extensions = {"one": NudgeWorker(COLUMN, 0.125)}
    with pytest.raises(LivenessError, match=r"not weight \* keep|has no effect"):
        verdict(Dead(CORRECTIONS["tis"], tw.actor_config(), prove=True, extensions=extensions))
    _, packet = run(Dead(CORRECTIONS["tis"], tw.actor_config(), prove=True, extensions=extensions))
    assert packet.proof is not None
    assert packet.proof.shifts["weight"].error > 0.1
