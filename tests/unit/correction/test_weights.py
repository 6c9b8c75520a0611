"""Importance weights on pi_old / mu: the caps by hand, and what they are good for by enumeration."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, batch_constants, rollout_stage
from tests.support.corrections import TIS, band, run, spec, tensor, values

LOG = math.log
SEQUENCE_TIS = TIS | {"level": "sequence", "upper": 5.0}
UNBOUND_TOKEN = TIS | {"upper": None}
UNBOUND_SEQUENCE = SEQUENCE_TIS | {"upper": None}


def test_token_tis() -> None:
    """min(rho, 2): rho = 0.5, 1, 2 and 8 give 0.5, 1, 2 and 2."""
    step = run(spec(TIS), mu=[[0.0, 0.0, 0.0, 0.0]], old=[[LOG(0.5), 0.0, LOG(2), LOG(8)]])
    assert step.weight.tolist() == [pytest.approx([0.5, 1.0, 2.0, 2.0], rel=1e-6)]
    assert step.weight.max() <= 2.0
    assert step.keep.all()


def test_sequence_tis() -> None:
    """min(prod rho, 5) on every token of the row.

    Row 0: 2 x 2 x 1 = 4, below the cap. Row 1: 2 x 2 x 2 = 8 -> 5. Row 2: 0.5 x 0.5 x 1 = 0.25; no lower bound.
    """
    two, half = LOG(2), LOG(0.5)
    step = run(spec(SEQUENCE_TIS), mu=torch.zeros(3, 3), old=[[two, two, 0.0], [two, two, two], [half, half, 0.0]])
    assert step.weight.tolist() == [pytest.approx([w] * 3, rel=1e-6) for w in (4.0, 5.0, 0.25)]


# Masked importance sampling ---------------------------------------------------------------------------------

REJECT = {"kind": "reject", "lower": 0.5, "upper": 2.0}


def test_reject_by_sequence() -> None:
    """Products 1.5 x 1.5 = 2.25, 1.5 x 1 = 1.5 and 0.6 x 0.6 = 0.36: the middle row is kept with 1.5 a token."""
    old = [[LOG(1.5), LOG(1.5)], [LOG(1.5), 0.0], [LOG(0.6), LOG(0.6)]]
    rows = dict(mu=torch.zeros(3, 2), old=old)
    step = run(spec(SEQUENCE_TIS | REJECT), **rows)
    assert step.keep.tolist() == [[False, False], [True, True], [False, False]]
    assert step.weight[1].tolist() == pytest.approx([1.5, 1.5], rel=1e-6)
    # The geometric means are 1.5, 1.22 and 0.6: all inside.
    assert run(spec(SEQUENCE_TIS | REJECT | {"aggregate": "geometric"}), **rows).keep.all()


def test_reject_looks_beyond_the_clamp() -> None:
    """A product of e^30 is a weight of e^20 at most, and outside of a bound of e^20 all the same."""
    upper = math.exp(20.0)
    step = run(spec(SEQUENCE_TIS | {"kind": "reject", "upper": upper}), mu=torch.zeros(1, 30), old=torch.ones(1, 30))
    assert not step.keep.any()


# By prefix --------------------------------------------------------------------------------------------------


def test_weights_by_prefix() -> None:
    """rho = 2, 1/4 and 3, and a tool token's 9 between: products 2, 1/2 and 3/2; roots 2, (1/2)^(1/2), (3/2)^(1/3)."""
    rows = dict(mu=torch.zeros(1, 4), old=[[LOG(2), LOG(0.25), LOG(9), LOG(3)]], mask=[[1, 1, 0, 1]])
    changes: dict[str, Any]
    for changes, expected in (
        ({}, [2.0, 0.5, 0.0, 1.5]),
        ({"aggregate": "geometric"}, [2.0, 0.5**0.5, 0.0, 1.5 ** (1 / 3)]),
        ({"aggregate": "minimum"}, [2.0, 0.25, 0.0, 0.75]),  # 2 x 1, 1/4 x 1, 3 x 1/4
        # Caps of 1.2^1, 1.2^2 and 1.2^3 at the first, second and third response token.
        ({"upper": 1.2, "by_position": 1.0}, [1.2, 0.5, 0.0, 1.5]),
        ({"upper": 1.1, "by_position": 1.0}, [1.1, 0.5, 0.0, 1.331]),
    ):
        step = run(spec(UNBOUND_TOKEN | {"level": "prefix"} | changes), **rows)
        assert step.weight.tolist() == [pytest.approx(expected, rel=1e-6)]


def test_a_veto_of_the_suffix() -> None:
    """From the first rho below 0.3 on, and where A < 0 alone."""
    veto = band(0.3, None, level="prefix", aggregate="any", when="negative")
    rows = dict(mu=torch.zeros(2, 3), old=[[0.0, LOG(0.2), 0.0]] * 2, advantages=[-1.0, 1.0])
    assert run(spec(veto=veto), **rows).keep.tolist() == [[True, False, False], [True, True, True]]


# Divided by their mean --------------------------------------------------------------------------------------


def test_what_is_rejected_counts_as_zero_in_the_mean() -> None:
    """Weights 0.5, 1.5 and 9, the last rejected: (0.5 + 1.5 + 0) / 3 = 2/3."""
    step = run(spec(TIS | REJECT | {"normalize": True}), mu=[[0.0] * 3], old=[[LOG(0.5), LOG(1.5), LOG(9)]])
    assert step.keep.tolist() == [[True, True, False]]
    assert (step.weight * step.keep).tolist() == [pytest.approx([0.75, 2.25, 0.0], rel=1e-6)]
    # Rows of product 0.5 and 9: 0.5 / 2 = 0.25.
    rows = dict(mu=torch.zeros(2, 2), old=[[LOG(0.5), 0.0], [LOG(3), LOG(3)]])
    step = run(spec(SEQUENCE_TIS | REJECT | {"normalize": True}), **rows)
    assert (step.weight * step.keep).tolist() == [pytest.approx([2.0, 2.0], rel=1e-6), [0.0, 0.0]]


def test_what_a_mask_drops_still_counts_in_the_mean() -> None:
    """The mean is taken before masks, so that their order cannot matter: (2 + 1) / 2 = 1.5."""
    step = run(spec(TIS | {"normalize": True}, gsm=band(0.9, 1.1)), mu=torch.zeros(2, 1), old=[[LOG(2)], [0.0]])
    assert step.keep.tolist() == [[False], [True]]
    assert step.weight.tolist() == [pytest.approx([2 / 1.5], rel=1e-6), pytest.approx([1 / 1.5], rel=1e-6)]


def test_the_mean_is_that_of_the_batch() -> None:
    """Weights 0.5 and 2 in two micro-batches: 0.5 / 1.25 and 2 / 1.25, not 1 and 1."""
    kind, zero = spec(TIS | {"normalize": True}), torch.zeros(1, 1)
    old = tensor([[LOG(0.5)], [LOG(2)]])
    whole = batch_constants(kind, old_log_prob=old, rollout_log_prob=old * 0, response_mask=torch.ones(2, 1))
    assert whole.weight_mean == pytest.approx(1.25, rel=1e-6)
    weights = [
        rollout_stage(kind, old_log_prob=row, rollout_log_prob=zero, response_mask=zero + 1, constants=whole).weight
        for row in (old[:1], old[1:])
    ]
    assert torch.cat(weights).flatten().tolist() == pytest.approx([0.4, 1.6], rel=1e-6)


# Nothing to weigh, and what is reported ---------------------------------------------------------------------


def test_what_the_logger_gets() -> None:
    """rho = 1, 4, 1, 4 under a cap of 2: before the cap the mean is 2.5, after it 1.5, half of them capped.

    Effective sample size (sum w)^2 / (n sum w^2): before 10^2 / (4 x 34) = 0.7353, after 6^2 / (4 x 10) = 0.9.
    Standard deviations: before 1.5, after 0.5.
    """
    result = values(run(spec(TIS), mu=torch.zeros(2, 2), old=[[0.0, LOG(4)], [0.0, LOG(4)]]))
    assert result["rollout_ratio/mean"] == pytest.approx(2.5, rel=1e-6)
    assert result["rollout_ratio/std"] == pytest.approx(1.5, rel=1e-6)
    assert result["rollout_ratio/ess"] == pytest.approx(100 / 136, rel=1e-6)
    assert result["weight/mean"] == pytest.approx(1.5, rel=1e-6)
    assert result["weight/std"] == pytest.approx(0.5, rel=1e-6)
    assert result["weight/ess"] == pytest.approx(0.9, rel=1e-6)
    assert (result["weight/min"], result["weight/max"]) == (1.0, 2.0)
    assert result["weight/truncated_share"] == 0.5


# Two tokens of three symbols: 9 sequences, so that every expectation is a finite sum in float64.

SEQUENCES = torch.tensor(list(itertools.product(range(3), repeat=2)))


def policy(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of the first token (3,) and of the second given the first (3, 3)."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (3, 3)))  # type: ignore[return-value]


def log_probs(logits: tuple[Tensor, Tensor]) -> Tensor:
    """log-probs of both tokens of each sequence, (9, 2)."""
    first, second = (x.log_softmax(-1) for x in logits)
    return torch.stack([first[SEQUENCES[:, 0]], second[SEQUENCES[:, 0], SEQUENCES[:, 1]]], dim=-1)


def enumerated_weights(kind: dict[str, object]) -> tuple[Tensor, Tensor, Tensor]:
    """mu's and pi_old's probabilities of the 9 sequences, and the weights (9, 2)."""
    mu, old = log_probs(policy(0)), log_probs(policy(1))
    step = run(spec(kind), mu=mu, old=old, dtype=torch.float64)
    return mu.sum(-1).exp(), old.sum(-1).exp(), step.weight


def test_untruncated_sequence_weights_are_unbiased() -> None:
    """E_mu[prod rho f] = E_old[f], exactly, for any f of the sequence."""
    mu, old, weight = enumerated_weights(UNBOUND_SEQUENCE)
    assert mu.sum().item() == pytest.approx(1.0, abs=1e-12)
    rewards = torch.arange(9, dtype=torch.float64).square() - 7.0
    assert (mu * weight[:, 0] * rewards).sum().item() == pytest.approx((old * rewards).sum().item(), abs=1e-12)
    assert (mu * weight[:, 1]).sum().item() == pytest.approx(1.0, abs=1e-12)


def test_untruncated_prefix_weights_are_unbiased_for_each_token() -> None:
    """E_mu[w_t f(y_1..y_t)] = E_old[f(y_1..y_t)], exactly, and with less variance than the product of the sequence."""
    mu, old, weight = enumerated_weights(UNBOUND_TOKEN | {"level": "prefix"})
    first = SEQUENCES[:, 0].double().square() - 1.5
    for token, value in enumerate((first, first * (SEQUENCES[:, 1] + 2.0))):
        expected = (old * value).sum().item()
        assert (mu * weight[:, token] * value).sum().item() == pytest.approx(expected, abs=1e-12)
    whole = enumerated_weights(UNBOUND_SEQUENCE)[2]
    assert (mu * weight[:, 0].square()).sum() < (mu * whole[:, 0].square()).sum()


def score_expectation(kind: dict[str, object]) -> Tensor:
    """E_mu[w_t grad log pi_old,t] summed over t, by enumeration: one number per logit, (12,)."""
    logits = tuple(x.requires_grad_() for x in policy(1))
    old, mu = log_probs(logits), log_probs(policy(0))  # type: ignore[arg-type]
    weight = run(spec(kind), mu=mu, old=old.detach(), dtype=torch.float64).weight
    gradients = torch.autograd.grad((mu.sum(-1).exp()[:, None] * weight * old).sum(), logits)
    return torch.cat([gradient.flatten() for gradient in gradients])


def test_untruncated_token_weights_leave_baselines_unbiased() -> None:
    """E_mu[rho_t grad log pi_t] = 0 exactly."""
    assert score_expectation(UNBOUND_TOKEN).abs().max().item() < 1e-14


@pytest.mark.parametrize("kind", [TIS | {"upper": 1.2}, TIS | {"lower": 0.8, "upper": None}, None])
def test_truncation_and_no_weight_break_that(kind: dict[str, object]) -> None:
    assert score_expectation(kind).abs().max().item() > 1e-2


def test_raw_and_applied_weights_are_both_reported() -> None:
    # Rows of two tokens with rho = 2, 3 and 1, 1: products 6 and 1; cap 5 leaves 5 and 1.
    spec = CorrectionSpec.from_mapping(
        {"weight": {"level": "sequence", "kind": "truncate", "lower": None, "upper": 5.0}}
    )
    old = torch.log(torch.tensor([[0.2, 0.3], [0.5, 0.5]], dtype=torch.float64))
    mu = torch.log(torch.tensor([[0.1, 0.1], [0.5, 0.5]], dtype=torch.float64))
    stage = rollout_stage(spec, old_log_prob=old, rollout_log_prob=mu, response_mask=torch.ones(2, 2))
    values = {name: statistic.value() for name, statistic in stage.statistics.items()}
    assert values["raw_weight/max"] == pytest.approx(6.0)
    assert values["raw_weight/mean"] == pytest.approx(3.5)
    assert values["weight/max"] == 5.0
    assert values["weight/mean"] == pytest.approx(3.0)
    assert values["weight/truncated_share"] == 0.5
    # ESS: (6 + 6 + 1 + 1)^2 / (4 (36 + 36 + 1 + 1)) = 196 / 296
    assert values["raw_weight/ess"] == pytest.approx(196 / 296)
