"""The first update of a run, without Ray: the steps of trainer and worker between rollout and verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict

from recipe.offpolicy.correction import CorrectionSpec
from tests.support import training_worker as tw

MISMATCH = 0.2
SEALED = (
    "rollout_log_probs",
    "old_log_probs",
    "advantages",
    "ref_log_prob",
    "offpolicy_scale",
)


def planned(spec: CorrectionSpec, rows: tw.Rollout, *, ranks: int = 1, step: int = 1, **loss: Any) -> TensorDict:
    """The batch as the trainer sends it, with its plan; ``loss`` are fields of the ActorConfig.

    Each of ``ranks`` takes a contiguous share of the rows.
    """
    from recipe.offpolicy.batch.plan import (
        PLAN,
        BatchSplit,
        SharedPlan,
        build_row_columns,
        compute_constants,
        seal_batch,
    )
    from recipe.offpolicy.batch.seals import INPUT, hash_model_input
    from recipe.offpolicy.batch.weight_versions import find_token_versions
    from verl.utils import tensordict_utils as tu

    if spec.proximal != "recompute":
        rows.old_log_probs = rows.rollout_log_probs
    data = rows.to_tensordict()
    if spec.recounts:
        batch_split = BatchSplit(ranks, len(data), loss.get("loss_agg_mode", "token-mean"))
        for name, column in build_row_columns(spec, data, batch_split).items():
            data[name] = column
    plan = SharedPlan(step=step, constants=compute_constants(spec, data))
    if not spec.is_none:
        sealed = {name: data[name] for name in SEALED if name in data.keys()} | {INPUT: hash_model_input(data)}
        if by_token := find_token_versions(spec, data):
            sealed |= by_token
        elif rows.versions:
            sealed["versions"] = torch.tensor([[version] * 2 for version in rows.versions])
        plan = seal_batch(plan, data, sealed)
    tu.assign_non_tensor(data, **{PLAN: plan})
    return data


def adapter(mapping: dict[str, Any], *, prove: bool = True, shadows: Any = None, **config: Any) -> Any:
    """The loss as the trainer hands it over, by default for the first update."""
    from recipe.offpolicy.worker.loss import OffPolicyLoss

    spec = CorrectionSpec.from_mapping(mapping)
    return OffPolicyLoss(spec, tw.actor_config(**config), prove=prove, shadows=shadows or {})


def acting_by(other: CorrectionSpec) -> type:
    """A subclass of the loss in which some parts act like parts of another correction with the same names, also in the
    proof's trials.
    """
    from recipe.offpolicy.batch import micro_batch as mb
    from recipe.offpolicy.worker.loss import OffPolicyLoss

    class ActingByAnother(OffPolicyLoss):
        def hand_over(self, batch: Any, step: Any) -> Any:
            masks = tuple((name, dict(other.masks)[name]) for name, _ in self.spec.masks)
            spec = replace(self.spec, weight=self.spec.weight and other.weight, masks=masks)
            return super().hand_over(batch, mb.decide(spec, batch))

    return ActingByAnother


def add_reference(rows: tw.Rollout) -> None:
    """Add a reference policy, which a weighted KL loss reads."""
    rows.ref_log_probs = [row + 0.1 for row in rows.old_log_probs or rows.rollout_log_probs]


def first_update(
    worker: Any,
    mapping: dict[str, Any],
    *,
    loss: Any = None,
    rollout: tw.Rollout | None = None,
    mismatch: float = MISMATCH,
    tamper: Callable[[tw.Rollout], None] = lambda rows: None,
    tamper_source: Callable[[tw.Rollout], None] = lambda rows: None,
    allow_identical: bool = False,
    micro_batch_size: int | None = 4,
    **config: Any,
) -> dict[str, float]:
    """Run one update and return its verdict; tampers act in the rollout, and between rollout and worker."""
    from recipe.offpolicy.proof.verify import verify
    from recipe.offpolicy.worker.metrics import take_packets
    from tests.support.sampled_rows import compute_sampled_checksums

    spec = CorrectionSpec.from_mapping(mapping)
    rows = tw.add_log_probs(worker, rollout or tw.make_rollout(), mismatch=mismatch)
    tamper_source(rows)
    sampled = compute_sampled_checksums(rows.to_tensordict())
    tamper(rows)
    data = planned(spec, rows, **config)
    metrics, _ = tw.gradients(worker, loss or adapter(mapping, **config), data, micro_batch_size=micro_batch_size)
    return verify(take_packets(metrics), spec, sampled_rows=sampled, allow_identical=allow_identical)
