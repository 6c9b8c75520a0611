"""The worker's evidence from one micro-batch, of a loss written out here: -sum of ratio x advantage x weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.batch import micro_batch as mb
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.proof.gradient import Proof, prove
from tests.support.corrections import TIS, band, spec

MASKED = spec(TIS, narrow=band(0.9, 1.1, level="token", aggregate="product"))


def policy_loss(model_output: Mapping[str, Any], data: TensorDict) -> tuple[Tensor, dict[str, Any]]:
    ratio = (mb.pad_log_probs(model_output, data) - data["old_log_probs"]).exp()
    return -(ratio * data["advantages"] * data[mb.WEIGHTS] * data["response_mask"]).sum(), {}


@dataclass
class Adapter:
    """A loss that corrects if ``alive``."""

    spec: CorrectionSpec
    alive: bool = True
    prove: bool = True
    shadows: dict[str, CorrectionSpec] = field(default_factory=dict)
    moving: dict[str, Any] = field(default_factory=dict)
    extensions: dict[str, Any] = field(default_factory=dict)
    verl_loss: Any = policy_loss
    base_loss: Any = policy_loss

    def extended(self, base_loss: Any) -> Any:
        return base_loss

    def __call__(self, model_output: Mapping[str, Any], data: TensorDict) -> tuple[Tensor, dict[str, Any]]:
        batch = mb.read(model_output, data)
        factor = mb.compute_factor(self.spec, batch, mb.decide(self.spec, batch, measure="nothing"))
        handed = {mb.WEIGHTS: factor if self.alive else torch.ones_like(factor), "old_log_probs": batch.old_log_prob}
        return policy_loss(model_output, batch.data_with(**handed))


def evidence(adapter: Adapter, *, scale: float = 1.0, advantage: float = 1.0, tokens: int = 1) -> Proof:
    """Two rows of three tokens; the ratios pi_old / mu of the first are 1.5, 1 and 3."""
    mask = torch.full((2, 3), tokens)
    mu = torch.full((2, 3), -2.0)
    old = mu + torch.tensor([[1.5, 1.0, 3.0], [1.0, 1.05, 1.0]]).log()
    columns = {"responses": mask, "response_mask": mask, "advantages": torch.full((2, 3), advantage)}
    data = TensorDict({**columns, "old_log_probs": old, mb.ROLLOUT_LOG_PROBS: mu}, batch_size=2)
    output = {"log_probs": old.clone().requires_grad_() * 1.0}
    loss, _ = adapter(output, data)
    proof = prove(adapter, mb.read(output, data), loss)
    if loss.requires_grad:
        (loss * scale).backward()
    return proof


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_live_correction(scale: float) -> None:
    proof = evidence(Adapter(MASKED), scale=scale)
    assert (proof.tokens, proof.gradient_tokens, proof.log_prob_bits) == (6, 6, 32)
    # mu and pi_old agree where the ratio is 1.
    assert proof.identical_tokens == 3
    assert proof.gradient_error is not None
    assert proof.gradient_error < 1e-5
    assert {name: shift.vacuous for name, shift in proof.shifts.items()} == {"weight": False, "masks.narrow": False}
    assert max(shift.error for shift in proof.shifts.values()) < proof.tolerance == 1e-4


def test_a_dead_correction() -> None:
    proof = evidence(Adapter(MASKED, alive=False))
    # At a rejected token 1 arrives and 0 is demanded; the largest gradient demanded is the weight 1.05.
    assert proof.gradient_error == pytest.approx(1 / 1.05)
    assert all(shift.error > proof.tolerance for shift in proof.shifts.values())


def test_nothing_of_the_loss_is_differentiated() -> None:
    assert evidence(Adapter(MASKED), scale=0.0).gradient_error == float("inf")


def test_advantages_of_zero_show_nothing() -> None:
    assert evidence(Adapter(MASKED), advantage=0.0).gradient_tokens == 0


def test_rows_without_a_token_are_not_proved() -> None:
    proof = evidence(Adapter(MASKED), tokens=0)
    assert (proof.tokens, proof.shifts, proof.gradient_error) == (0, {}, None)


def test_mu_off_by_one_token_shows_in_the_distances() -> None:
    before, same, after = evidence(Adapter(MASKED)).distances
    # Only the middle token has two neighbours; mu is -2 everywhere, and pi_old there -2 and -2 + log 1.05.
    assert (before, same, after) == pytest.approx((0.04879,) * 3, rel=1e-3)
