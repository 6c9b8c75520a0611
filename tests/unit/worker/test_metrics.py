"""Packets that wait in the worker until the update's last mini-batch."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch

from recipe.offpolicy.batch.micro_batch import MicroBatch
from recipe.offpolicy.correction import Reduction, Statistic
from recipe.offpolicy.monitor.mismatch_shares import build_share_statistics
from recipe.offpolicy.worker import metrics as measurement
from recipe.offpolicy.worker.metrics import METRIC_KEY, Ledger, Observation, Packet, merge_metrics
from tests.support.corrections import TIS, spec


def observation() -> Observation:
    """One row of two tokens, all policies alike."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    policies = {name: torch.full((1, 2), -1.0) for name in ("rollout_log_prob", "old_log_prob", "log_prob")}
    batch = MicroBatch(responses=mask.long(), response_mask=mask, advantages=torch.ones(1, 2), **policies)
    return Observation(batch, spec(TIS), {}, {}, trained=True)


def test_a_packet_is_not_pickled_with_its_numbers_on_the_device() -> None:
    ledger, packet = Ledger(), Packet(1)
    ledger.enter(packet, observation())
    with pytest.raises(RuntimeError, match=r"Fix: call before_sending\(\) first"):
        pickle.dumps(packet)
    packet.before_sending()
    copy = pickle.loads(pickle.dumps(packet))
    assert len(copy.rows) == 1
    assert copy.statistics["weight/mean"].value() == 1.0


def test_the_last_mini_batch_takes_along_what_waited() -> None:
    ledger, first, last = Ledger(), Packet(1), Packet(1)
    ledger.enter(first, observation(), more=True)
    first.before_sending()
    assert ledger.keeps(first)
    assert pickle.loads(pickle.dumps(first)).rows == []
    ledger.enter(last, observation())
    last.before_sending()
    assert (len(first.rows), len(last.rows)) == (0, 2)
    assert not ledger.keeps(first)


def test_a_packet_that_nobody_wants_takes_its_rows_with_it() -> None:
    ledger, unwanted, wanted = Ledger(), Packet(1), Packet(1)
    ledger.enter(unwanted, observation())
    del unwanted
    ledger.enter(wanted, observation())
    wanted.settle()
    assert len(wanted.rows) == 1


def packet_of(rows: int, statistics: int) -> Packet:
    """Many of both, as long runs have them."""
    found = {f"name/{number}": Statistic(Reduction.MEAN, (number / 3, 2.0), about=1.0) for number in range(statistics)}
    return Packet(1, rows=[-(7**20) + row for row in range(rows)], statistics=found, histograms=dict(found))


def test_a_packet_arrives_as_it_was_to_the_bit() -> None:
    sent = packet_of(3, 2)
    sent.statistics = {**sent.statistics, **build_share_statistics([0.1, -0.0, math.inf, 1e-320])}
    arrived = pickle.loads(pickle.dumps(sent))
    assert arrived == sent
    assert arrived.rows == sent.rows
    assert [repr(one) for one in arrived.statistics.items()] == [repr(one) for one in sent.statistics.items()]
    again = pickle.loads(pickle.dumps(arrived))
    assert (again, again.histograms) == (sent, sent.histograms)


def test_rows_of_large_micro_batches_are_measured_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets of 3 rows under a limit of 2: each is measured in two blocks, and nothing is lost or counted twice."""
    monkeypatch.setattr("recipe.offpolicy.worker.metrics.AT_ONCE", 4)
    ledger, packets, one = Ledger(), [Packet(1) for _ in range(5)], observation()
    three = {name: getattr(one.batch, name).expand(3, 2) for name in measurement._COLUMNS}
    for packet in packets:
        ledger.enter(packet, replace(one, batch=replace(one.batch, **three)))
    packets[-1].settle()
    assert packets[-1].statistics["weight/mean"].parts[1] == 30.0
    assert packets[-1].rows == [packets[-1].rows[0]] * 15


def test_metrics_of_parts_are_one_value_a_micro_batch() -> None:
    from verl.utils.metric import Metric

    parts = [
        {"loss": Metric("sum", loss), "clip": Metric("mean", clip), "coefficient": 0.1, METRIC_KEY: name}
        for loss, clip, name in ((1.0, 0.2, "first"), (2.0, 0.4, "second"))
    ]
    merged = merge_metrics(parts)
    assert merged["loss"].values == [3.0]
    assert merged["clip"].values == [pytest.approx(0.3)]
    assert (merged["coefficient"], merged[METRIC_KEY]) == (0.1, ["first", "second"])
