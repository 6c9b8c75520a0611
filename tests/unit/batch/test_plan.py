"""Batch-level constants that the trainer computes before the first gradient step, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from recipe.offpolicy.batch import plan
from recipe.offpolicy.batch.plan import MINI_BATCH_TOKENS, SCALE, BatchSplit
from tests.support.corrections import band, spec
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

TOKEN_MASK = band(0.5, 3.0, level="token", aggregate="product")
ONE_MINI_BATCH = BatchSplit(ranks=1, mini_batch_rows=3, loss_agg_mode="token-mean")


def rows() -> TensorDict:
    """Ratios pi_old / mu of 1 and 4, of 4, and of 1 and 2; mu is 1."""
    ratios = torch.tensor([[1.0, 4.0], [4.0, 1.0], [1.0, 2.0]])
    columns = {
        "response_mask": torch.tensor([[1, 1], [1, 0], [1, 1]]).bool(),
        "old_log_probs": ratios.log(),
        "rollout_log_probs": torch.zeros(3, 2),
    }
    return TensorDict(columns, batch_size=3)


def test_columns_of_the_kept_denominator() -> None:
    kept = replace(spec(any=TOKEN_MASK), denominator="kept")
    columns = plan.build_row_columns(kept, rows(), ONE_MINI_BATCH)
    # 5 tokens, of which 3 are kept.
    assert columns[SCALE].tolist() == pytest.approx([5 / 3] * 3)
    assert columns[MINI_BATCH_TOKENS].tolist() == [5, 5, 5]
    by_row = plan.build_row_columns(kept, rows(), replace(ONE_MINI_BATCH, mini_batch_rows=1))
    # 2 of 1, 1 of none, whose loss is 0 either way, and 2 of 2.
    assert by_row[SCALE].tolist() == [2.0, 1.0, 1.0]
    assert by_row[MINI_BATCH_TOKENS].tolist() == [2, 1, 2]
    _, sent = plan.build_plan(kept, {}, step=1, rows=rows, batch_split=lambda: ONE_MINI_BATCH)
    assert sent.keys() == columns.keys()


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "sapo", "dppo_tv", "cispo"])
def test_the_kept_denominator_counts_as_verls_own_loss_divides(loss_mode: str) -> None:
    """Some of verl's losses divide by sequences and their tokens, whatever ``loss_agg_mode`` is."""
    actor: dict[str, Any] = {
        "rollout_n": 1,
        "ppo_mini_batch_size": 3,
        "ppo_micro_batch_size_per_gpu": 1,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": loss_mode},
    }
    config = OmegaConf.create({"actor_rollout_ref": {"actor": actor, "rollout": {"n": 1}}})
    split = BatchSplit.of(config, 1)
    batch = rows()
    log_prob = torch.zeros(3, 2, requires_grad=True)
    mask, rollout = batch["response_mask"].float(), {"clip_ratio": 10.0, "clip_ratio_c": 20.0}
    own = FSDPActorConfig(**{**actor, "policy_loss": PolicyLossConfig(loss_mode=loss_mode)}, **rollout)
    loss = get_policy_loss_fn(loss_mode)(
        log_prob.detach(), log_prob, torch.ones(3, 2), mask, loss_agg_mode="token-mean", config=own
    )[0]
    (gradient,) = torch.autograd.grad(loss, log_prob)
    # Rows of 2, 1 and 2 tokens: by token all weigh the same, by sequence the one token of row 1 weighs two.
    by_sequence = split.loss_agg_mode == "seq-mean-token-mean"
    assert float(gradient[1, 0] / gradient[0, 0]) == pytest.approx(2.0 if by_sequence else 1.0)
    assert by_sequence >= (loss_mode == "sapo")
    kept = replace(spec(any=TOKEN_MASK), denominator="kept")
    scale = plan.build_row_columns(kept, batch, split)[SCALE].tolist()
    # 3 of 5 tokens and 2 of 3 rows are kept, of row 0 one token of two.
    assert scale == pytest.approx([3.0, 1.5, 1.5] if by_sequence else [5 / 3] * 3)
