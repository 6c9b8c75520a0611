"""Extensions on verl 0.7.1's legacy FSDP actor: their terms and reports, also where nothing corrects the loss."""

from __future__ import annotations

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


def shipped() -> dict[str, torch.Tensor]:
    batch = la.rollout()
    return batch | {COLUMN: batch["response_mask"].double()}


def extended_update(mapping: lu.Settings, coefficients: dict[str, float], **config: Any) -> tuple[la.Parameters, Any]:
    extensions = {section: NudgeWorker(COLUMN, coef) for section, coef in coefficients.items()}
    return lu.update(mapping, shipped(), sent={"extensions": extensions}, **config)


@pytest.mark.parametrize("name", lu.MAPPINGS)
@pytest.mark.parametrize("size", [2, 8])
def test_terms_are_trained_with_the_denominators_of_the_mini_batch(name: str, size: int, start: la.Parameters) -> None:
    found, metrics = extended_update(lu.MAPPINGS[name], COEFFICIENTS, ppo_micro_batch_size_per_gpu=size)
    coef = sum(COEFFICIENTS.values())
    expected = lu.plain_with_term(lu.MAPPINGS[name], shipped(), lambda log_prob: -coef * log_prob)
    assert la.distance(found, expected, start) < lu.EXACT
    packets = take_packets(metrics)
    assert len(packets) == len(la.LENGTHS) // size
    tokens = shipped()["response_mask"].sum().item()
    for section in COEFFICIENTS:
        reports = [packet.reports[section] for packet in packets]
        assert (sum(n for n, _ in reports), sum(total for _, total in reports)) == (len(la.LENGTHS), tokens)
    if name == "tis":
        assert all(packet.proof.gradient_error < packet.proof.tolerance for packet in packets)


def test_a_coefficient_of_zero_trains_as_without_extensions(start: la.Parameters) -> None:
    plain = lu.corrected(lu.MAPPINGS["tis"])
    found, _ = extended_update(lu.MAPPINGS["tis"], {"one": 0.0})
    assert la.distance(found, plain, start) == 0
