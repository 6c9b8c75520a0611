"""``correction.proximal=same_engine``: mu has to be pi_old, token by token, before it stands in its place."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from recipe.offpolicy.correction.correction_parts import TOLERANCE
from recipe.offpolicy.proof.rollout_log_probs import SameEngineCheck, SameEngineError
from tests.support.packed import packed

UIDS = ["one", "one", "two"]


def rows(*, apart: float, at: tuple[int, int] = (1, 2), nested: bool = False) -> TensorDict:
    """Rows of 4, 3 and 1 tokens, alike but for one token."""
    lengths = torch.tensor([4, 3, 1])
    mask = torch.arange(4) < lengths[:, None]
    old = -torch.arange(1.0, 13.0).view(3, 4) / 8
    mu = old.clone()
    mu[at] += apart
    columns = {"response_mask": mask.long(), "rollout_log_probs": mu, "old_log_probs": old}
    if nested:
        columns = {name: packed(column, lengths.tolist()) for name, column in columns.items()}
    return TensorDict(columns, batch_size=3)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("apart", [0.0, 9e-7, -9e-7])
def test_one_engine(apart: float, nested: bool) -> None:
    check = SameEngineCheck()
    assert not check.passed
    assert math.isnan(check.metrics()["same_engine/largest_difference"])
    check.judge(rows(apart=apart, nested=nested), UIDS, step=1)
    assert check.passed
    assert check.metrics()["same_engine/largest_difference"] == pytest.approx(abs(apart), abs=1e-7)
    assert check.largest is not None
    assert check.largest <= TOLERANCE


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("apart", [1.2e-6, -0.25, math.nan, -math.inf])
def test_two_engines(apart: float, nested: bool) -> None:
    """Row 1, token 2: old = -7 / 8, and mu of -1.125 with a difference of -0.25."""
    check = SameEngineCheck()
    with pytest.raises(SameEngineError) as caught:
        check.judge(rows(apart=apart, nested=nested), UIDS, step=5)
    message = str(caught.value)
    for part in ("at step 5, sequence 1 (uid one), response token 2", "log pi_old -0.875", "1 of 8 tokens differ"):
        assert part in message, message
    if apart == -0.25:
        assert "|mu - pi_old| is 0.25 nats" in message
        assert "log mu is -1.125" in message
    assert "Set correction.proximal=recompute" in message
    assert not check.passed


def test_a_batch_without_tokens_shows_nothing() -> None:
    check = SameEngineCheck()
    empty = rows(apart=0.0)
    empty["response_mask"] = empty["response_mask"] * 0
    check.judge(empty, UIDS, step=1)
    assert not check.passed
