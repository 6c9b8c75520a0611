"""verl's own distillation loss and ours, where the two coincide: all rows, no bound, no gate."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.worker.loss import OffPolicyLoss
from tests.support import training_worker as tw
from tests.support.distilled import Run, opinion
from tests.support.fake_teacher import FakeTeacher, serving

pytestmark = pytest.mark.verl(">=0.8")

ALL = {"eligible": {"max_pass_rate": 1.0, "rows": "all"}, "max_gap": 1e3}


@pytest.fixture
def teacher() -> Iterator[FakeTeacher]:
    with serving(FakeTeacher(score=opinion)) as serves:
        yield serves


def verls_gradient(run: Run, **settings: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient at the flat log-probs of verl's ``distillation_ppo_loss``, on the columns that it reads."""
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.workers.config import DistillationLossConfig

    config = DistillationLossConfig(loss_max_clamp=None, **settings)
    data = run.data()
    rows = []
    for prompt, response in run.batch.token_ids:
        # That of token i + 1 at i, and a last one that stands for nothing.
        rows.append(torch.tensor([*opinion([*prompt, *response]), 0.0])[:, None])
    data["teacher_logprobs"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    leaf = run.flat.clone().requires_grad_()
    offsets = torch.tensor([0, *run.whole]).cumsum(0)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(leaf, offsets)}
    distillation: Any = SimpleNamespace(distillation_loss=config)
    loss, _ = distillation_ppo_loss(tw.actor_config(), distillation, output, data)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def our_gradient(run: Run) -> tuple[Tensor, Tensor]:
    leaf = run.flat.clone().requires_grad_()
    offsets = torch.tensor([0, *run.whole]).cumsum(0)
    loss = OffPolicyLoss(CorrectionSpec(), tw.actor_config(), extensions={"opd": run.opd.worker()})
    value, _ = loss({"log_probs": torch.nested.nested_tensor_from_jagged(leaf, offsets)}, run.data())
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def test_the_loss_is_verls_k2_beside_the_rewards(teacher: FakeTeacher) -> None:
    run = Run(teacher.url, "loss", coef=0.25, corrected=False, **ALL)
    value, gradient = our_gradient(run)
    wanted, of_verl = verls_gradient(
        run, loss_mode="k2", use_policy_gradient=False, use_task_rewards=True, distillation_loss_coef=0.25
    )
    torch.testing.assert_close(value, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, of_verl, atol=1e-6, rtol=1e-6)


def test_advantages_are_verls_k1_as_a_policy_gradient(teacher: FakeTeacher) -> None:
    """At pi = pi_old; verl's has no term of the rewards then."""
    run = Run(teacher.url, "advantage", coef=1.0, **ALL)
    _, gradient = our_gradient(run)
    _, of_verl = verls_gradient(run, loss_mode="k1", use_policy_gradient=True, use_task_rewards=False)
    torch.testing.assert_close(gradient, of_verl, atol=1e-6, rtol=1e-6)
