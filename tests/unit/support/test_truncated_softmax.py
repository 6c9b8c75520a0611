"""Log-probs renormalised over a support: by hand, by enumeration, and with their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.support.token_supports import compute_truncated_log_probs

F64 = torch.float64


def truncated(logits: Tensor, token: int, ids: list[int], temperature: float = 1.0) -> Tensor:
    return compute_truncated_log_probs(
        logits[None], torch.tensor([0]), torch.tensor([token]), torch.tensor([ids]), torch.tensor([temperature])
    )[0]


def test_over_the_whole_vocabulary_it_is_the_log_softmax() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1), dtype=F64)
    tokens, rows = torch.tensor([2, 8, 0, 5]), torch.arange(4)
    ids = torch.arange(9).expand(4, 9)
    found = compute_truncated_log_probs(logits, rows, tokens, ids, torch.ones(4))
    torch.testing.assert_close(found, logits.log_softmax(-1)[rows, tokens], rtol=0, atol=1e-14)


def test_the_corrected_gradient_is_that_of_the_truncated_policy() -> None:
    """By enumeration: E_mu[pi/mu A grad log pi] over supports is the gradient of the truncated policy's E[A].

    mu and pi have different logits and truncate to the same support, the engine's. Renormalised over it, they have the
    same support, and the expectation is exact; with log-softmax over the vocabulary, it is not.
    """
    generator = torch.Generator().manual_seed(2)
    support, advantages = [0, 2, 3], torch.randn(6, generator=generator, dtype=F64)
    engine = torch.randn(6, generator=generator, dtype=F64)
    trainer = (engine + 0.3 * torch.randn(6, generator=generator, dtype=F64)).requires_grad_()
    mu = engine[support].softmax(0)
    (wanted,) = torch.autograd.grad((trainer[support].softmax(0) * advantages[support]).sum(), trainer)
    over_support, over_vocabulary = torch.zeros(6, dtype=F64), torch.zeros(6, dtype=F64)
    for place, token in enumerate(support):
        for log_pi, into in (
            (truncated(trainer, token, support), over_support),
            (trainer.log_softmax(0)[token], over_vocabulary),
        ):
            weight = log_pi.detach().exp() / mu[place]
            (slope,) = torch.autograd.grad(log_pi, trainer)
            into += mu[place] * weight * advantages[token] * slope
    torch.testing.assert_close(over_support, wanted, rtol=0, atol=1e-14)
    assert float((over_vocabulary - wanted).abs().max()) > 0.05


def test_temperature_acts_before_the_truncation() -> None:
    # At temperature 2 the probabilities 16 : 4 : 1 are as 4 : 2 : 1.
    logits = torch.tensor([16.0, 4.0, 1.0], dtype=F64).log()
    assert float(truncated(logits, 1, [0, 1], temperature=2.0).exp()) == pytest.approx(2 / 6, abs=1e-14)
