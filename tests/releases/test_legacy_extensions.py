"""Extensions on verl 0.7.1's legacy FSDP actor: their terms and reports, also where nothing corrects the loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from recipe.offpolicy.worker.metrics import take_packets
from tests.support import legacy_actor as la
from tests.support import legacy_updates as lu
from tests.support.nudge import NudgeWorker

pytestmark = [pytest.mark.verl("==0.7.1"), pytest.mark.usefixtures("legacy_patches")]

COLUMN = "offpolicy_nudge"
COEFFICIENTS = {"one": 0.125, "two": 0.5}
MAPPINGS: dict[str, lu.Settings] = {"none": {}, "tis": lu.CORRECTIONS["tis"]}


def shipped() -> dict[str, torch.Tensor]:
    batch = la.rollout()
    return batch | {COLUMN: batch["response_mask"].double()}


def extended_update(mapping: lu.Settings, coefficients: dict[str, float], **config: Any) -> tuple[la.Parameters, Any]:
    extensions = {section: NudgeWorker(COLUMN, coef) for section, coef in coefficients.items()}
    return lu.update(mapping, shipped(), sent={"extensions": extensions}, **config)


def expected(mapping: lu.Settings) -> la.Parameters:
    """The plain update, whose loss has the terms of both extensions in it."""
    batch, module = shipped(), copy.deepcopy(la.model())
    what = la.Plain(mapping or None)
    forward = la.forward(module, batch)
    log_prob = forward[0]
    mask = batch["response_mask"].bool()
    weight = torch.ones_like(log_prob)
    if mapping:
        weight = la.weight_and_keep(mapping, batch, log_prob.detach(), batch["old_log_probs"])
    term = (-log_prob * weight)[mask].sum() / mask.sum()
    with pytest.MonkeyPatch.context() as patch:
        # One backward pass, as the actor's: the model's norms round to float32 in each.
        patch.setattr(la, "forward", lambda *_: forward)
        (la.plain_loss(module, batch, what) + sum(COEFFICIENTS.values()) * term).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= what.learning_rate * parameter.grad
    return la.parameters(module)


@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("size", [2, 8])
def test_terms_are_trained_with_the_denominators_of_the_mini_batch(name: str, size: int, start: la.Parameters) -> None:
    found, metrics = extended_update(MAPPINGS[name], COEFFICIENTS, ppo_micro_batch_size_per_gpu=size)
    assert la.distance(found, expected(MAPPINGS[name]), start) < lu.EXACT
    packets = take_packets(metrics)
    assert len(packets) == len(la.LENGTHS) // size
    tokens = shipped()["response_mask"].sum().item()
    for section in COEFFICIENTS:
        reports = [packet.reports[section] for packet in packets]
        assert (sum(n for n, _ in reports), sum(total for _, total in reports)) == (len(la.LENGTHS), tokens)
    if name == "tis":
        assert all(packet.proof.gradient_error < packet.proof.tolerance for packet in packets)


def test_a_coefficient_of_zero_trains_as_without_extensions(start: la.Parameters) -> None:
    plain = lu.corrected(MAPPINGS["tis"])
    found, _ = extended_update(MAPPINGS["tis"], {"one": 0.0})
    assert la.distance(found, plain, start) == 0
