"""A real verl TrainingWorker in this process equals verl's own loss and a plain reference, for every split."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec
from tests.support import training_worker as tw
from tests.support.first_update import adapter, planned
from tests.support.specs import BATCH_WIDE, GSM, STACK
from verl.workers.config import PolicyLossConfig


@pytest.fixture(scope="module")
def worker(engine: Any) -> Any:
    return engine


def rollout(worker: Any, mismatch: float = 0.2) -> tw.Rollout:
    return tw.add_log_probs(worker, tw.make_rollout(), mismatch=mismatch)


our_loss = partial(adapter, prove=False)


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo"])
def test_nothing_configured_is_verl_to_the_bit(worker: Any, loss_mode: str) -> None:
    changes = {"policy_loss": PolicyLossConfig(loss_mode=loss_mode)}
    data = rollout(worker).to_tensordict()
    verls = tw.plain_loss(**changes)
    verl_metrics, verl_gradient = tw.gradients(worker, verls, data, micro_batch_size=4)
    metrics, gradient = tw.gradients(worker, our_loss({}, **changes), data, micro_batch_size=4)
    assert metrics["loss"] == verl_metrics["loss"]
    assert tw.equal(gradient, verl_gradient)


def test_equal_policies_are_a_no_op_to_the_bit(worker: Any) -> None:
    rows = rollout(worker)
    rows.rollout_log_probs = rows.old_log_probs  # R4
    verl_metrics, verl_gradient = tw.gradients(worker, tw.plain_loss(), rows.to_tensordict())
    metrics, gradient = tw.gradients(worker, our_loss(STACK), rows.to_tensordict())
    assert metrics["loss"] == verl_metrics["loss"]
    assert tw.equal(gradient, verl_gradient)


def reference_gradient(
    worker: Any, rows: tw.Rollout, weight: list[torch.Tensor], clip: float = 0.2
) -> tuple[float, dict[str, torch.Tensor]]:
    """Token-mean PPO with given weights, computed by a plain Hugging Face model in float64, one row at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(worker.model_config.path, dtype=torch.float64)
    model.load_state_dict(
        {n.removeprefix("module."): p.double() for n, p in tw.parameters(worker).items()}, strict=False
    )
    tokens = sum(int(mask.sum()) for mask in rows.response_mask)
    total = torch.zeros((), dtype=torch.float64)
    for prompt, response, mask, advantage, old, w in zip(
        rows.prompts, rows.responses, rows.response_mask, rows.advantages, rows.old_log_probs, weight, strict=True
    ):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        log_prob = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        r = (log_prob - old.double()).exp()
        a = advantage.double()
        objective = torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a)
        total = total - (w * objective * mask).sum() / tokens
    total.backward()
    return float(total.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "token-sum"])
def test_split_into_micro_batches_changes_nothing(worker: Any, loss_agg_mode: str) -> None:
    data = rollout(worker).to_tensordict()
    loss = our_loss(STACK, loss_agg_mode=loss_agg_mode)
    whole, gradient = tw.gradients(worker, loss, data)
    whole_statistics = tw.measured(whole)
    split, split_gradient = tw.gradients(worker, loss, data, micro_batch_size=2)
    assert split["loss"][0] == pytest.approx(whole["loss"][0], rel=1e-5)
    assert tw.close(split_gradient, gradient)
    assert tw.measured(split) == pytest.approx(whole_statistics, rel=1e-4, abs=1e-5, nan_ok=True)


def test_two_ranks_equal_one(worker: Any, tmp_path: Path) -> None:
    """This includes batch-level constants: self-normalised weights, a budget, and the number of kept tokens."""
    of_two = tw.run_two_ranks("corrected", worker.model_config.path, tmp_path)
    for name, mapping in {"stack": STACK, "batch_wide": BATCH_WIDE}.items():
        data = planned(CorrectionSpec.from_mapping(mapping), rollout(worker))
        metrics, gradient = tw.gradients(worker, our_loss(mapping), data)
        ranks = of_two[name]
        assert ranks["loss"] == pytest.approx(metrics["loss"][0], rel=1e-5)
        assert tw.close(ranks["gradient"], gradient)
        assert ranks["statistics"] == pytest.approx(tw.measured(metrics), rel=1e-4, abs=1e-5, nan_ok=True)


def test_fully_masked_micro_batches_contribute_exactly_zero(worker: Any) -> None:
    rows = rollout(worker)
    # Every second row leaves the band: its micro-batch of one row must add nothing, not NaN.
    rows.rollout_log_probs = [mu - float(i % 2) for i, mu in enumerate(rows.old_log_probs)]
    metrics, gradient = tw.gradients(
        worker, our_loss({"masks": {"gsm": GSM}}), rows.to_tensordict(), micro_batch_size=1
    )
    assert tw.measured(metrics)["keep/sequence_share"] == 0.5
    loss, reference = reference_gradient(
        worker, rows, [mask * float(i % 2 == 0) for i, mask in enumerate(rows.response_mask)]
    )
    assert metrics["loss"][0] == pytest.approx(loss, rel=1e-5)
    assert tw.close(gradient, reference)


def test_non_finite_mu_takes_the_token_out(worker: Any) -> None:
    rows = rollout(worker, mismatch=0.0)
    rows.rollout_log_probs = [mu.clone() for mu in rows.old_log_probs]
    rows.rollout_log_probs[1][0] = float("nan")
    rows.old_log_probs = [old.clone() for old in rows.old_log_probs]
    rows.old_log_probs[3][0] = float("-inf")
    metrics, gradient = tw.gradients(worker, our_loss(STACK), rows.to_tensordict())
    counted = tw.measured(metrics)
    assert counted["nonfinite/rollout_log_prob"] == 1.0
    assert counted["nonfinite/old_log_prob"] == 1.0
    weights = [mask.double() for mask in rows.response_mask]
    weights[1][0] = weights[3][0] = 0.0
    rows.old_log_probs[3][0] = 0.0  # any finite value: its weight is 0
    loss, reference = reference_gradient(worker, rows, weights)
    # Its terms nearly cancel, so that the rounding of float32 shows.
    assert metrics["loss"][0] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert tw.close(gradient, reference)


def test_non_finite_advantages_stop_before_the_optimizer_step(worker: Any) -> None:
    rows = rollout(worker)
    rows.advantages[2] = torch.full_like(rows.advantages[2], float("nan"))
    with pytest.raises(FloatingPointError, match="advantages"):
        tw.gradients(worker, our_loss(STACK), rows.to_tensordict())


def test_non_finite_current_policy_stops_before_the_optimizer_step(engine_factory: Any) -> None:
    worker = engine_factory()
    rows = rollout(worker)
    name, weight = next(iter(worker.engine.module.named_parameters()))
    with torch.no_grad():
        weight.to_local().fill_(float("nan"))
    before = tw.parameters(worker)
    with pytest.raises(FloatingPointError, match="not finite"):
        tw.update(worker, our_loss(STACK), rows.to_tensordict())
    after = tw.parameters(worker)
    assert all(torch.equal(before[n], after[n]) for n in before if n != name)
