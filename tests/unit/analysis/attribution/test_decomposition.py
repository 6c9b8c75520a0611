"""A decomposition: its draws, the routing part, and the location of the mismatch, by hand and in total."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recipe.offpolicy.analysis.attribution.decomposition import (
    PROFILES,
    Bucket,
    Decomposition,
    build_profiles,
    compute_routing_sums,
    compute_row_sums,
    decompose,
    drop_shares,
    merge,
    resample,
    sum_cells,
)
from recipe.offpolicy.monitor.mismatch_shares import compute_sums_by_row
from recipe.offpolicy.recording import Rows, concatenate
from recipe.offpolicy.recording.schema import WITHOUT_REPLAY
from tests.support.attributed import attribute_rows
from tests.support.recordings import drawn_rows, sampled_by


def k3(log_ratio: float) -> float:
    return math.exp(log_ratio) - 1 - log_ratio


def split(rows: Rows) -> Decomposition:
    sums = {"recorded": compute_row_sums(rows), **compute_routing_sums(rows)}
    return decompose({name: resample(each) for name, each in sums.items()})


def without_replay(rows: Rows, native: NDArray[np.float32]) -> Rows:
    return replace(rows, extensions={WITHOUT_REPLAY: native.astype(np.float32)})


def by_hand() -> Rows:
    """One row of two tokens: backend 0.1 and -0.1, routing 0.2 and 0, drift 0.3 and 0.1."""
    mu = np.array([-2.0, -2.0])
    old = mu + np.array([0.1, -0.1])
    rows = drawn_rows(
        [2],
        rollout_log_prob=mu.astype(np.float32),
        old_log_prob=old.astype(np.float32),
        log_prob=(old + np.array([0.3, 0.1])).astype(np.float32),
    )
    return without_replay(rows, old + np.array([0.2, 0.0]))


def test_sums_of_ragged_rows_are_those_of_padded_ones() -> None:
    """Rows of several lengths and ages; one row is empty, and one token has no finite log-prob."""
    rows = drawn_rows([3, 50, 1, 0, 20], step=4, backend=0.1, drift=0.1, oldest_version=np.array([3, 1, 0, 3, -1]))
    rows.log_prob[7] = np.nan
    columns = rows.padded("rollout_log_prob", "old_log_prob", "log_prob", "token_staleness")
    expected = compute_sums_by_row(staleness=columns.pop("token_staleness"), **columns).numpy()
    assert compute_row_sums(rows) == pytest.approx(expected, rel=1e-13, abs=1e-16)
    assert expected[1].sum() != 0


def test_by_hand() -> None:
    """The totals are 0.6 and 0, with variance 0.09; the covariance of each part with the total is 0.03."""
    rows = by_hand()
    found = split(rows)
    of_variance = found.variance
    assert of_variance.whole == pytest.approx(0.09, rel=1e-5)
    assert [of_variance.backend, of_variance.routing, of_variance.drift] == pytest.approx([1 / 3] * 3, rel=1e-4)
    assert of_variance.staleness == pytest.approx(0.0, abs=1e-9)
    whole = k3(0.6)
    backend, with_routing = k3(0.1) + k3(-0.1), k3(0.3) + k3(-0.1)
    of_kl = found.kl
    assert of_kl.whole == pytest.approx(whole / 2, rel=1e-5)
    expected = [backend / whole, (with_routing - backend) / whole, (whole - with_routing) / whole]
    assert [of_kl.backend, of_kl.routing, of_kl.drift] == pytest.approx(expected, rel=1e-4)
    # As trained, with replay, log pi/mu is 0.4 and 0.
    assert found.replayed_kl == pytest.approx(k3(0.4) / 2, rel=1e-5)


def aged() -> Rows:
    """Fresh and stale rows of two steps."""
    steps = []
    for step in (4, 5):
        rows = sampled_by(
            drawn_rows([40] * 32, seed=step, step=step, drift=0.05), [step - 1 - row % 2 for row in range(32)]
        )
        noise = np.random.default_rng(step).standard_normal(rows.tokens)
        steps.append(without_replay(rows, rows.old_log_prob + 0.1 * noise))
    return concatenate(steps)


def test_parts_add_up_to_the_whole_by_step_and_in_all() -> None:
    whole = attribute_rows(aged(), {})
    assert list(whole.by_step) == [4, 5]
    for found in (whole.whole, *whole.by_step.values()):
        for of in (found.variance, found.kl):
            assert None not in (of.backend, of.staleness, of.routing, of.drift)
            assert of.rollout + of.routing + of.drift == pytest.approx(1.0, abs=1e-9)
            assert of.backend + of.staleness + of.routing + of.drift == pytest.approx(1.0, abs=1e-9)
        assert found.kl.routing > 0.5
        low, high = found.intervals["kl.routing"]
        assert low < found.kl.routing < high
        merged = drop_shares(found, "backend", "staleness").kl
        assert merged.rollout + merged.routing + merged.drift == pytest.approx(1.0, abs=1e-9)


def two_rows(**columns: Any) -> Rows:
    """Rows of 2 and 3 tokens. The gap is 0.1 everywhere, except -1 at the last token, which is in another turn after a
    tool's.
    """
    mu = np.log(np.array([0.3, 0.95, 0.3, 0.5, 0.0005])).astype(np.float32)
    gap = np.array([0.1, 0.1, 0.1, 5.0, -1.0], dtype=np.float32)
    values: dict[str, Any] = {
        "rollout_log_prob": mu,
        "old_log_prob": mu + gap,
        "log_prob": mu + gap,
        "response_mask": np.array([True, True, True, False, True]),
        "length": np.array([2, 2], dtype=np.int32),
        "turn": np.array([0, 0, 0, -1, 1], dtype=np.int16),
        "response_ids": np.array([10, 11, 12, 13, 14], dtype=np.int32),
        "prompt_ids": np.array([1, 2, 3, 4], dtype=np.int32),
        "oldest_version": np.array([0, -1]),
    }
    return drawn_rows([2, 3], **(values | columns))


def profile(rows: Rows) -> dict[str, list[Bucket]]:
    return build_profiles(merge(sum_cells(rows)[0], *PROFILES))


def test_profiles_worked_by_hand() -> None:
    """The tool's token, with a gap of 5, is in none of the profiles."""
    rows = two_rows()
    found = profile(rows)
    whole = 3 * k3(0.1) + k3(-1.0)
    turns = {bucket.name: bucket for bucket in found["turn"]}
    assert set(turns) == {"0", "1"}
    assert (turns["0"].tokens, turns["1"].tokens) == (3, 1)
    assert turns["0"].k3 == pytest.approx(k3(0.1), rel=1e-5)
    assert turns["1"].share == pytest.approx(k3(-1.0) / whole, rel=1e-5)
    assert turns["1"].mean == pytest.approx(-1.0, rel=1e-6)
    assert {bucket.name: bucket.tokens for bucket in found["probability"]} == {"< 0.001": 1, "0.1-0.5": 2, "> 0.9": 1}
    # Places from 1: the first tokens of both rows; places 2 and 3 of the second and third.
    assert {bucket.name: bucket.tokens for bucket in found["position"]} == {"1": 2, "2-4": 2}
    assert {bucket.name: bucket.tokens for bucket in found["length"]} == {"2-4": 4}
    assert {bucket.name: bucket.tokens for bucket in found["staleness"]} == {"unknown": 2, "0": 2}
    for buckets in found.values():
        assert sum(bucket.share for bucket in buckets) == pytest.approx(1.0)
