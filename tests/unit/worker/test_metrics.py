"""Measurements of micro-batches: several at once, in blocks, and in packets that wait for the last mini-batch."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from recipe.offpolicy.batch.micro_batch import MicroBatch
from recipe.offpolicy.batch.plan import SharedPlan
from recipe.offpolicy.batch.weight_versions import RowVersions, TokenVersions
from recipe.offpolicy.correction.statistics import fetch, merge_all
from recipe.offpolicy.worker.metrics import (
    METRIC_KEY,
    Ledger,
    Observation,
    Packet,
    measure,
    merge,
    merge_metrics,
    split,
)
from tests.support.corrections import TIS, spec


def observation(ratios: list[list[float]], *, version: int | None = None, **changes: Any) -> Observation:
    """Rows with these ratios pi_old / mu; a ratio of 0 is padding."""
    ratio = torch.tensor(ratios)
    mask = ratio > 0
    old = torch.where(mask, ratio, 1.0).log() - 2.0
    versions = None if version is None else RowVersions(*torch.full((2, len(ratios)), version))
    batch = MicroBatch(
        responses=mask.long(),
        response_mask=mask,
        rollout_log_prob=torch.full_like(ratio, -2.0),
        old_log_prob=old,
        log_prob=old,
        advantages=torch.ones_like(ratio),
        versions=versions,
        plan=SharedPlan(4),
    )
    return replace(Observation(batch, spec(TIS), {}, {}, trained=True), **changes)


def test_versions_by_token_are_put_together_too() -> None:
    def of(ratios: list[list[float]], tokens: list[list[int]]) -> Observation:
        versions = TokenVersions(*torch.full((2, len(tokens)), 3), torch.tensor(tokens))
        made = observation(ratios)
        return replace(made, batch=replace(made.batch, versions=versions))

    parts = [of([[1.0]], [[2]]), of([[1.0, 3.0], [2.0, 0.0]], [[2, 3], [-1, -1]])]
    joined = merge(parts)
    assert isinstance(joined.batch.versions, TokenVersions)
    assert joined.batch.versions.tokens.tolist() == [[2, -1], [2, 3], [-1, -1]]
    assert not parts[0].fits(observation([[1.0]], version=2))
    # In step 4 tokens of version 2 and 3 are 1 and 0 old, and the unknown one is as old as its row.
    readings = measure(joined)
    found = dict(zip(readings, fetch(list(readings.values())), strict=True))["statistics"]
    assert [found[f"staleness/{age}/token_count"].value() for age in ("is0", "is1")] == [2.0, 2.0]
    assert found["staleness/unknown_by_token"].value() == 1.0
    assert found["staleness/mean"].value() == 0.5


def test_what_cannot_be_measured_as_one() -> None:
    first = observation([[1.0]])
    assert first.fits(observation([[2.0, 3.0]]))
    others = [
        observation([[1.0]], version=1),
        observation([[1.0]], trained=False),
        observation([[1.0]], spec=spec({**TIS, "upper": 3.0})),
        replace(first, batch=replace(first.batch, plan=SharedPlan(5))),
        replace(first, batch=replace(first.batch, log_prob=first.batch.log_prob.double())),
    ]
    assert [first.fits(other) for other in others] == [False] * len(others)


def test_blocks_of_an_observation_are_the_whole_of_it() -> None:
    versions = TokenVersions(*torch.full((2, 3), 3), torch.tensor([[2, 3], [3, -1], [3, 3]]))
    whole = observation([[1.0, 3.0], [1.5, 0.0], [2.0, 2.0]])
    withheld = torch.tensor([[False, True], [False, False], [False, False]])
    whole = replace(whole, batch=replace(whole.batch, versions=versions, withheld=withheld))
    blocks = list(split(whole, 4))
    assert [len(block.batch.response_mask) for block in blocks] == [2, 1]
    assert [len(block.batch.response_mask) for block in split(whole, 1)] == [1, 1, 1]  # a row is not cut
    assert list(split(whole, 6)) == [whole]

    def read(parts: list[Observation]) -> tuple[dict[str, float], list[int]]:
        readings = [measure(part) for part in parts]
        found = [dict(zip(each, fetch(list(each.values())), strict=True)) for each in readings]
        merged = merge_all(one["statistics"] | one["attribution"] for one in found)
        return {name: one.value() for name, one in merged.items()}, [row for one in found for row in one["rows"]]

    (statistics, rows), (expected, expected_rows) = read(blocks), read([whole])
    assert statistics == pytest.approx(expected, rel=1e-12, nan_ok=True)
    assert rows == expected_rows


def test_a_packet_is_not_pickled_with_its_numbers_on_the_device() -> None:
    ledger, packet = Ledger(), Packet(1)
    ledger.enter(packet, observation([[1.0, 1.0]]))
    with pytest.raises(RuntimeError, match=r"Fix: call before_sending\(\) first"):
        pickle.dumps(packet)
    packet.before_sending()
    copy = pickle.loads(pickle.dumps(packet))
    assert len(copy.rows) == 1
    assert copy.statistics["weight/mean"].value() == 1.0


def test_the_last_mini_batch_takes_along_what_waited() -> None:
    ledger, first, last = Ledger(), Packet(1), Packet(1)
    ledger.enter(first, observation([[1.0, 1.0]]), more=True)
    first.before_sending()
    assert ledger.keeps(first)
    assert pickle.loads(pickle.dumps(first)).rows == []
    ledger.enter(last, observation([[1.0, 1.0]]))
    last.before_sending()
    assert (len(first.rows), len(last.rows)) == (0, 2)
    assert not ledger.keeps(first)


def test_a_packet_that_nobody_wants_takes_its_rows_with_it() -> None:
    ledger, unwanted, wanted = Ledger(), Packet(1), Packet(1)
    ledger.enter(unwanted, observation([[1.0, 1.0]]))
    del unwanted
    ledger.enter(wanted, observation([[1.0, 1.0]]))
    wanted.settle()
    assert len(wanted.rows) == 1


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
