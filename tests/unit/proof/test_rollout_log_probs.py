"""Log-probs that stop arriving are named by what came instead."""

from __future__ import annotations

import pytest
import torch

from recipe.offpolicy.proof.rollout_log_probs import (
    RolloutLogProbError,
    check_arrived,
    check_placeholders,
    check_zeros,
)

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


def test_zeros_at_two_far_tokens_are_named_without_ids_as_well() -> None:
    mu, trainer = torch.full((4, 3), -1.0), torch.full((4, 3), -1.2)
    mu[:2, 2], trainer[:2, 2] = 0.0, -4.0
    with pytest.raises(
        RolloutLogProbError, match=r"exactly 0 at 2 tokens in 2 of 4 sequences, .* probability is e\^-4: the number"
    ):
        check_placeholders(mu, trainer, torch.ones(4, 3))
    trainer[0, 2] = -0.9  # near enough, and one row alone tells nothing
    check_placeholders(mu, trainer, torch.ones(4, 3))
