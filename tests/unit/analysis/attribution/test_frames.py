"""The routing part: log pi_old by replayed routes and by the trainer's own, worked by hand and in sum."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from recipe.offpolicy.analysis.attribution.attribution_page import (
    build_page,
    build_shares_table,
    build_steps_table,
    format_replayed,
    format_shares,
)
from recipe.offpolicy.analysis.attribution.decomposition import (
    Decomposition,
    compute_routing_sums,
    compute_row_sums,
    decompose,
    drop_shares,
    resample,
)
from recipe.offpolicy.analysis.table import to_rich
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
    """Rows of several lengths and ages, one of them empty, and a token without a finite log-prob."""
    rows = drawn_rows([3, 50, 1, 0, 20], step=4, backend=0.1, drift=0.1, oldest_version=np.array([3, 1, 0, 3, -1]))
    rows.log_prob[7] = np.nan
    columns = rows.padded("rollout_log_prob", "old_log_prob", "log_prob", "token_staleness")
    expected = compute_sums_by_row(staleness=columns.pop("token_staleness"), **columns).numpy()
    assert compute_row_sums(rows) == pytest.approx(expected, rel=1e-13, abs=1e-16)
    assert expected[1].sum() != 0


def test_by_hand() -> None:
    """The whole is 0.6 and 0, of variance 0.09, with which each part has the covariance 0.03."""
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


def test_other_shares_are_those_of_a_policy_without_replay() -> None:
    """Rows whose pi_old and pi were computed without replay have the same whole, drift and rollout's share in sum."""
    rows = aged()
    native = rows.extensions[WITHOUT_REPLAY]
    moved = replace(rows, old_log_prob=native, log_prob=rows.log_prob + native - rows.old_log_prob)
    apart, plain = split(rows), split(replace(moved, extensions={}))
    for one, other in ((apart.variance, plain.variance), (apart.kl, plain.kl)):
        assert one.whole == pytest.approx(other.whole)
        assert one.drift == pytest.approx(other.drift)
        assert one.rollout + one.routing == pytest.approx(other.rollout)


def test_a_step_without_the_column_takes_none_of_the_part_away() -> None:
    """Its tokens count in neither with replay nor without, as single ones of which one is not known."""
    rows = aged()
    alone = attribute_rows(rows, {}).whole.kl
    bare = drawn_rows([40] * 8, seed=9, step=6)
    alongside = attribute_rows(concatenate([rows, bare]), {}).whole.kl
    assert (alongside.routing, alongside.whole) == pytest.approx((alone.routing, alone.whole))


def test_without_the_column_nothing_changes() -> None:
    rows = replace(aged(), extensions={})
    assert compute_routing_sums(rows) == {}
    assert compute_routing_sums(without_replay(rows, np.full(rows.tokens, np.nan))) == {}
    found = split(rows)
    assert (found.kl.routing, found.replayed_kl) == (None, None)
    assert format_replayed(found) == ""
    assert "routing" not in [row[0] for row in build_shares_table(found).rows]


def test_a_token_of_which_one_is_not_known_counts_in_neither() -> None:
    rows = by_hand()
    native = rows.extensions[WITHOUT_REPLAY].copy()
    native[1] = np.nan
    found = split(without_replay(rows, native))
    assert found.tokens == 1
    assert found.kl.whole == pytest.approx(k3(0.6), rel=1e-5)


def test_tables_name_the_part_and_both_wholes() -> None:
    found = attribute_rows(aged(), {})
    table = build_shares_table(found.whole)
    assert table.title == "log pi/mu without replay, split"
    assert [row[0] for row in table.rows] == ["backend", "staleness", "routing", "drift"]
    assert "routing" in [column.name for column in build_steps_table(dict(found.by_step)).columns]
    assert format_shares(found.whole).endswith("of KL(mu, pi) without replay")
    said = format_replayed(found.whole)
    assert "without replay of routes, and" in said
    assert said in build_page(found, "").render()
    assert to_rich(table)
