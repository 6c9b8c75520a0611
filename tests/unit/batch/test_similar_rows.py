"""Splits of a micro-batch: groups by hand, and the corrected loss of the parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.batch import padding
from recipe.offpolicy.batch.padding import AT_ONCE, FEW, group_rows
from scripts.benchmark.simulated_parts import CORRECTION, build_actor_config, build_micro_batch
from tests.support.legacy_rows import build_legacy_losses
from tests.support.padded_rows import pad_columns

LENGTHS = [3, 40, 5, 1, 33, 2, 9, 17]


def test_rows_of_similar_length_are_together() -> None:
    assert group_rows([32768, *[256] * 128]) == [[0], [*range(1, 129)]]
    assert group_rows([3, 1, 2]) == [[0, 1, 2]]
    # 2^18 are four rows of 2^16.
    assert [len(group) for group in group_rows([1 << 16] * 10)] == [4, 4, 2]


@given(st.lists(st.integers(0, 1 << 17), min_size=1, max_size=200))
def test_groups_hold_each_row_once_and_not_too_many_tokens(lengths: list[int]) -> None:
    groups = group_rows(lengths)
    assert sorted(row for group in groups for row in group) == [*range(len(lengths))]
    for group in groups:
        padded = len(group) * max(lengths[row] for row in group)
        assert padded <= AT_ONCE
        assert padded <= max(FEW, 2 * sum(lengths[row] for row in group))


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["nested", "padded"])
def test_the_loss_of_the_parts_is_the_loss_of_all(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.proof.verify import verify
    from recipe.offpolicy.worker.loss import OffPolicyLoss
    from recipe.offpolicy.worker.metrics import METRIC_KEY, take_packets

    spec = CorrectionSpec.from_mapping(CORRECTION)
    output, data = build_micro_batch(sum(LENGTHS), LENGTHS)
    if padded:
        data = pad_columns(data)
    config = build_actor_config(len(data))

    def update() -> tuple[Any, ...]:
        loss = OffPolicyLoss(spec, config, prove=True)
        model_output = output()
        model_output["log_probs"].retain_grad()
        value, metrics = loss(model_output=model_output, data=data)
        value.backward()
        packets = len(metrics[METRIC_KEY]) if isinstance(metrics[METRIC_KEY], list) else 1
        found = take_packets(metrics)
        rows = sorted(row for packet in found for row in packet.rows)
        live = verify(found, spec, sampled_rows=rows)
        return packets, value, model_output["log_probs"].grad.values(), rows, live, metrics

    whole = update()
    monkeypatch.setattr(padding, "AT_ONCE", 64)
    monkeypatch.setattr(padding, "FEW", 16)
    assert group_rows(LENGTHS) == [[1], [4], [6, 7], [0, 2, 5], [3]]
    parts = update()
    assert (whole[0], parts[0]) == (1, 5)
    assert parts[1].item() == pytest.approx(whole[1].item(), rel=1e-5)
    assert torch.equal(parts[2], whole[2])
    assert parts[3] == whole[3]
    assert parts[4]["proved"] == whole[4]["proved"] == 1.0
    assert parts[4]["gradient_tokens"] == whole[4]["gradient_tokens"]
    loss, of_parts = (metrics["actor/pg_loss"] for metrics in (whole[5], parts[5]))
    assert len(of_parts.values) == len(loss.values) == 1
    assert of_parts.aggregate() == pytest.approx(loss.aggregate(), rel=1e-5)


def test_the_loss_of_a_legacy_actor_is_that_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.worker.metrics import take_packets

    found = []
    for at_once in (AT_ONCE, 64):
        monkeypatch.setattr(padding, "AT_ONCE", at_once)
        monkeypatch.setattr(padding, "FEW", 16)
        log_prob, _, corrected = build_legacy_losses(LENGTHS, prove=True)
        loss, metrics = corrected()
        loss.backward()
        packets = take_packets(metrics)
        errors = [packet.proof.gradient_error for packet in packets if packet.proof is not None]
        found.append((loss.item(), log_prob.grad, sorted(row for packet in packets for row in packet.rows), errors))
    (whole, gradient, rows, one), (parts, of_parts, rows_of_parts, five) = found
    assert (len(one), len(five)) == (1, 5)
    assert max(one + five) < 1e-5
    assert parts == pytest.approx(whole, rel=1e-5)
    assert torch.equal(of_parts, gradient)
    assert rows_of_parts == rows
