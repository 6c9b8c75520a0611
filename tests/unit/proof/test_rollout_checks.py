"""The checks of each rollout's log-probs, nested as in V1 and padded as in V0."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from recipe.offpolicy.correction.correction_parts import TOLERANCE
from recipe.offpolicy.proof.rollout_log_probs import (
    RolloutChecker,
    RolloutLogProbError,
    SameEngineCheck,
    SameEngineError,
    check_arrived,
    check_zeros,
    name_missing_column,
)
from recipe.offpolicy.proof.token_alignment import tally_agreements
from tests.support.packed import packed
from tests.support.sampled_rows import compute_sampled_checksums

ROWS, WIDTH = 64, 12


def rollout(*, nested: bool, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(WIDTH) < torch.randint(6, WIDTH + 1, (ROWS, 1), generator=generator)
    old = -2.0 * torch.rand(ROWS, WIDTH, generator=generator)
    columns = {
        "responses": torch.randint(0, 99, (ROWS, WIDTH), generator=generator),
        "response_mask": mask.long(),
        "rollout_log_probs": old + 0.01 * torch.randn(ROWS, WIDTH, generator=generator).clamp(max=0.0),
        "old_log_probs": old,
    }
    if nested:
        columns = {name: packed(column, mask.sum(-1).tolist()) for name, column in columns.items()}
    return TensorDict(columns, batch_size=ROWS)


@pytest.mark.parametrize("nested", [True, False])
def test_a_healthy_rollout(nested: bool) -> None:
    watch, rows = RolloutChecker(), rollout(nested=nested)
    assert watch.check_sampled(rows) == compute_sampled_checksums(rows)
    watch.check_aligned(rows, groups=[str(row // 8) for row in range(ROWS)])
    assert watch.metrics()["alignment/concordance_rows"] > 0.95
    assert watch.metrics().keys() == {f"alignment/concordance_{kind}" for kind in ("rows", "siblings", "tokens")}


@pytest.mark.parametrize(("number", "rows"), [(0.0, 2), (0.0, 64), (-9.5, 64)])
@pytest.mark.parametrize("nested", [True, False])
def test_a_number_at_single_tokens(nested: bool, number: float, rows: int) -> None:
    given = rollout(nested=nested)
    for row in range(rows):
        given["responses"][row][3] = 7
        given["rollout_log_probs"][row][3] = number
        given["old_log_probs"][row][3] = -6.0
    said = rf"exactly {number:g} at {rows} tokens in {rows} of 64 sequences, .* probability is e\^-6, all with the id 7"
    with pytest.raises(RolloutLogProbError, match=said):
        RolloutChecker().check_aligned(given)


@pytest.mark.parametrize("nested", [True, False])
def test_sure_tokens_and_far_ones_are_no_placeholders(nested: bool) -> None:
    given = rollout(nested=nested)
    for row in range(ROWS):
        given["rollout_log_probs"][row][3] = 0.0
        given["old_log_probs"][row][3] = -0.4  # a token that the rollout's weights were sure of
    for row in range(8):
        given["rollout_log_probs"][row][2] = -8.0 - row / 64  # far, each by its own number
    given["old_log_probs"][0][3] = -6.0
    RolloutChecker().check_aligned(given)


@pytest.mark.parametrize("number", [0.0, -0.017])
@pytest.mark.parametrize("nested", [True, False])
def test_equal_responses_of_a_group_have_equal_log_probs(nested: bool, number: float) -> None:
    """The trainer has moved away from a token of which older weights were certain; otherwise, it is a placeholder."""
    given, groups = rollout(nested=nested), [str(row // 16) for row in range(ROWS)]
    for row in range(16):
        given["responses"][row][:4] = given["responses"][0][:4]
        given["rollout_log_probs"][row][3] = number
        given["old_log_probs"][row][3] = -5.1
    RolloutChecker().check_aligned(given, groups)
    with pytest.raises(RolloutLogProbError, match="at 16 tokens in 16 of 64 sequences"):
        RolloutChecker().check_aligned(given, [str(row) for row in range(ROWS)])
    for row in range(16):
        given["responses"][row][0] = row
    with pytest.raises(RolloutLogProbError, match="at 16 tokens in 16 of 64 sequences"):
        RolloutChecker().check_aligned(given, groups)


@pytest.mark.parametrize("nested", [True, False])
def test_zeros(nested: bool) -> None:
    rows = rollout(nested=nested)
    rows["rollout_log_probs"] = rows["rollout_log_probs"] * 0
    watch = RolloutChecker()
    watch.check_sampled(rows)
    with pytest.raises(RolloutLogProbError, match="64 of 64 sequences contain only zeros"):
        watch.check_aligned(rows)


def test_a_store_in_which_some_rows_lack_them() -> None:
    with pytest.raises(RolloutLogProbError, match="are missing"), name_missing_column():
        raise ValueError("Some fields are not ready in all the requested keys!")
    with pytest.raises(ValueError, match="were not found"), name_missing_column():
        raise ValueError("keys or partition were not found!")


@pytest.mark.parametrize("grouped", [True, False])
def test_a_large_batch_has_one_tally_in_both_layouts(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are more or longer rows than are compared, both layouts take the same rows."""
    monkeypatch.setattr("recipe.offpolicy.proof.token_alignment.MOST_ELEMENTS", 256)
    monkeypatch.setattr("recipe.offpolicy.proof.token_alignment.MOST_POSITIONS", 9)
    nested, padded = rollout(nested=True), rollout(nested=False)
    groups = [str(row % 8) for row in range(ROWS)] if grouped else None
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    tally = tally_agreements(*(nested[name] for name in names), groups)
    assert tally == tally_agreements(*(padded[name] for name in names), groups)
    assert tally.rows.pairs[1] > 0


MASK = torch.ones(4, 10)
MU = -torch.rand(4, 10, generator=torch.Generator().manual_seed(0)) - 0.01


@pytest.mark.parametrize(
    ("mu", "match"),
    [
        (torch.full((4, 10), torch.nan), "40 of 40 are not finite"),
        (torch.where(torch.arange(10) < 6, -torch.inf, MU), "24 of 40 are not finite"),
        (torch.full((4, 10), -1.0), "all 40 values are the placeholder -1"),
        (-MU, "above 0"),
    ],
)
def test_what_is_no_log_prob(mu: torch.Tensor, match: str) -> None:
    with pytest.raises(RolloutLogProbError, match=match):
        check_arrived(mu, MASK)


def test_padding_is_not_read() -> None:
    mask = torch.zeros(4, 10)
    mask[:, :5] = 1
    check_arrived(torch.where(mask.bool(), MU, torch.nan), mask)
    check_arrived(torch.full((4, 10), torch.nan), torch.zeros(4, 10))
    check_arrived(MU[:0], MASK[:0])


def test_zeros_of_an_engine_that_is_sure_pass() -> None:
    # All probabilities round to 1: the trainer says so too.
    check_arrived(torch.zeros(4, 10), MASK)
    check_zeros(torch.zeros(4, 10), torch.full((4, 10), -0.01), MASK)


UIDS = ["one", "one", "two"]


def rows(*, apart: float, at: tuple[int, int] = (1, 2), nested: bool = False) -> TensorDict:
    """Rows of 4, 3 and 1 tokens that differ in one token."""
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
    """Row 1, token 2: old = -7 / 8, and mu = -1.125 for a difference of -0.25."""
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
