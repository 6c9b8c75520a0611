"""Steps of a replay, from the two stages to gradient weights and groups, worked out on two rows by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from recipe.offpolicy.analysis.whatif.replay import (
    Block,
    check_replayable,
    compute_pi_old,
    decide,
    pad_rows,
)
from recipe.offpolicy.correction import BatchConstants, SpecError
from recipe.offpolicy.recording import Rows
from tests.support.acted import by_hand
from tests.support.corrections import TIS, spec
from tests.support.recordings import sampled_by

LOG2 = math.log(2.0)
# pi_old / mu by token: row 0 (A = 1): 4, 1, 1/2; row 1 (A = -2): 2, 2. pi / pi_old: 2 on the first token, else 1.
MU = [[-3.0, -2.0, -1.0], [-2.0, -2.0]]
OLD = [[-3.0 + 2 * LOG2, -2.0, -1.0 - LOG2], [-2.0 + LOG2, -2.0 + LOG2]]
PI = np.array([-3.0 + 3 * LOG2, -2.0, -1.0 - LOG2, -2.0 + LOG2, -2.0 + LOG2], dtype=np.float32)
A = np.array([1, 1, 1, -2, -2], dtype=np.float32)
NONE, TOKEN_TIS = spec(), spec(TIS)


def rows() -> Rows:
    return by_hand(OLD, MU, log_prob=PI, advantages=A)


def whole(of: Rows) -> Block:
    return pad_rows(of, np.arange(len(of)))


def test_what_was_not_recorded_is_not_replayed() -> None:
    bypassed = replace(NONE, proximal="bypass")
    check_replayable(TOKEN_TIS, NONE, rows())
    check_replayable(bypassed, bypassed, rows())
    with pytest.raises(SpecError, match=r"correction\.proximal=recompute: the run used correction\.proximal=bypass"):
        check_replayable(TOKEN_TIS, bypassed, rows())
    one_engine = replace(NONE, proximal="same_engine")
    with pytest.raises(
        SpecError, match=r"the run used correction\.proximal=bypass, so pi_old was not computed, and mu"
    ):
        check_replayable(one_engine, bypassed, rows())
    by_version = spec(TIS | {"level": "version"})
    known = sampled_by(rows(), [3, 4])
    check_replayable(by_version, NONE, known)
    mixed = sampled_by(known, [2, -1], [3, -1])
    with pytest.raises(SpecError, match="for 2 of 2 rows it is unknown which version of the weights sampled"):
        check_replayable(by_version, NONE, mixed)


def test_mu_in_the_place_of_pi_old_is_replayed_where_the_run_would_have_gone_on() -> None:
    """rho is 4, 1, 1/2 and twice more than 1: four of five tokens differ. Alike, both engines are one."""
    one_engine = replace(NONE, proximal="same_engine")
    with pytest.raises(SpecError, match=r"at 4 of 5 tokens mu differs from pi_old by more than 1e-06 nats, so the run"):
        check_replayable(one_engine, NONE, rows())
    alike = replace(rows(), old_log_prob=rows().rollout_log_prob)
    check_replayable(one_engine, NONE, alike)
    check_replayable(TOKEN_TIS, one_engine, alike)
    assert torch.equal(compute_pi_old(one_engine, NONE, whole(alike)), whole(alike).rollout_log_prob)


STALE = spec(stale={"aggregate": "staleness", "level": "token", "upper": 2})


def test_a_token_of_an_unknown_version_is_as_old_as_its_row() -> None:
    mixed = sampled_by(replace(rows(), step=np.full(2, 5)), [3, 1], [4, 3])
    check_replayable(STALE, NONE, mixed)
    assert decide(STALE, NONE, whole(mixed), BatchConstants()).keep.any(-1).tolist() == [True, False]
    with pytest.raises(SpecError, match="depends on the age of the weights: for 1 of 2 rows"):
        check_replayable(STALE, NONE, sampled_by(mixed, [3, -1], [4, -1]))
