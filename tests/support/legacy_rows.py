"""A micro-batch of a legacy actor, sealed, with verl's loss and the corrected loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.batch.plan import SharedPlan, seal_batch
from recipe.offpolicy.batch.seals import INPUT, hash_model_input
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.worker.legacy_loss import Handover, LegacyUpdate
from scripts.benchmark.simulated_parts import CORRECTION, build_actor_config, build_micro_batch
from tests.support.padded_rows import pad_columns
from verl_patches.legacy.handover import MINI_ROWS, MINI_TOKENS

Loss = Callable[[], tuple[Tensor, dict[str, Any]]]
SENT = ("responses", "response_mask", "old_log_probs", "advantages", "rollout_log_probs", "attention_mask")


def build_legacy_losses(lengths: Sequence[int], *, prove: bool = False) -> tuple[Tensor, Loss, Loss]:
    """Return the log-probs of the current policy, (B, T), as a leaf, and verl's loss and the corrected loss as
    functions.
    """
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    data = pad_columns(build_micro_batch(sum(lengths), lengths)[1])
    rows = data.select(*SENT)
    rows["input_ids"] = torch.cat([data["prompts"], data["responses"]], 1)
    rows["position_ids"] = (data["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    rows[MINI_TOKENS], rows[MINI_ROWS] = torch.full((len(rows),), sum(lengths)), torch.full((len(rows),), len(rows))
    sealed = {name: rows[name] for name in ("rollout_log_probs", "old_log_probs", "advantages")}
    plan = seal_batch(SharedPlan(1), rows, sealed | {INPUT: hash_model_input(rows)})
    config = build_actor_config(len(rows))
    update = LegacyUpdate(
        Handover(CorrectionSpec.from_mapping(CORRECTION), plan, prove=prove), config, dp_size=1, upstream=lambda: 1.0
    )
    log_prob = (rows["old_log_probs"] + 0.01 * rows["advantages"]).requires_grad_()
    given = {name: rows[name] for name in ("advantages", "response_mask")} | {"old_log_prob": rows["old_log_probs"]}
    verls = partial(get_policy_loss_fn("vanilla"), **given, loss_agg_mode="token-mean", config=config)

    def corrected() -> tuple[Tensor, dict[str, Any]]:
        update.begin(TensorDict(dict(rows.items()), len(rows)), scale=0.5)
        value, metrics = update.get_policy_loss_fn(get_policy_loss_fn, "vanilla")(log_prob=log_prob * 1.0)
        return value, metrics

    return log_prob, lambda: verls(log_prob=log_prob * 1.0), corrected
