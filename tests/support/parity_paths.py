"""The batch of ``parity_case`` as each worker path receives it, and the result of each path.

A policy loss of the test, which verl's public registry uses instead of ``vanilla``, records it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recipe.offpolicy.batch.plan import BatchSplit
from recipe.offpolicy.extensions.opd.signal import CENTRE, FACTOR, ROW, TEACHER
from tests.support import training_worker as tw
from tests.support.parity_case import (
    CORRECTIONS,
    ENTROPY_COEFF,
    KL_COEF,
    LENGTHS,
    PROMPT,
    ROWS,
    TEMPERATURE,
    Case,
    add_plan,
)
from tests.support.parity_update import Update

if TYPE_CHECKING:  # scripts/gpu.sh runs where pytest may be missing
    import pytest


def actor_settings(mode: str, loss_mode: str = "witness") -> dict[str, Any]:
    """Fields of verl's ActorConfig for which the reference's formulas hold."""
    from verl.workers.config import PolicyLossConfig

    return dict(
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
        loss_agg_mode=mode,
        entropy_coeff=ENTROPY_COEFF,
        use_kl_loss=True,
        kl_loss_type="low_var_kl",
        kl_loss_coef=KL_COEF,
    )


def build_case_plan(case: Case, spec: Any, mode: str, mini_rows: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Build columns and plan as the V0 trainer sends them."""
    columns = dict(case.columns)
    if spec.proximal == "bypass":
        columns["old_log_probs"] = columns["rollout_log_probs"]
    return add_plan(columns, spec, BatchSplit(ranks=1, mini_batch_rows=mini_rows, loss_agg_mode=mode))


def batch_v0(case: Case, spec: Any, mode: str, mini_rows: int) -> Any:
    """Build the TensorDict that the V0 trainer sends to the engine's workers."""
    from recipe.offpolicy.batch.plan import PLAN
    from verl import DataProto
    from verl.workers.utils.padding import left_right_2_no_padding

    plan, columns = build_case_plan(case, spec, mode, mini_rows)
    return left_right_2_no_padding(DataProto.from_dict(columns, meta_info={PLAN: plan}).to_tensordict())


def batch_v1(case: Case, spec: Any, mode: str, mini_rows: int) -> Any:
    """Build the TensorDict that the V1 trainer sends, with all columns nested by row."""
    from recipe.offpolicy.batch.plan import PLAN
    from verl.utils import tensordict_utils as tu

    plan, columns = build_case_plan(case, spec, mode, mini_rows)

    def by_row(name: str) -> list[torch.Tensor]:
        return [columns[name][row, : LENGTHS[row]] for row in range(ROWS)]

    present = columns["attention_mask"].bool()
    rollout = tw.Rollout(
        prompts=[columns["prompts"][row][present[row, :PROMPT]] for row in range(ROWS)],
        responses=by_row("responses"),
        response_mask=by_row("response_mask"),
        advantages=by_row("advantages"),
        rollout_log_probs=by_row("rollout_log_probs"),
        old_log_probs=by_row("old_log_probs"),
        ref_log_probs=by_row("ref_log_prob"),
    )
    data = rollout.to_tensordict()
    for name in columns.keys() - case.columns.keys() | columns.keys() & {ROW, FACTOR, CENTRE}:
        data[name] = columns[name]
    if case.distilled:
        data[TEACHER] = torch.nested.as_nested_tensor(by_row(TEACHER), layout=torch.jagged)
    tu.assign_non_tensor(data, **{PLAN: plan})
    return data


@dataclass
class Witness:
    """A loss under verl's loss_mode ``witness`` that calls ``vanilla`` and remembers its inputs.

    Attributes:
        calls: by micro-batch, the loss and the factor of each token by its responses' row in ``case``.
    """

    case: Case
    factors: list[dict[tuple[int, int], float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def register(self) -> None:
        from verl.trainer.ppo import core_algos

        core_algos.POLICY_LOSS_REGISTRY["witness"] = self

    def update(self, gradients: dict[str, Tensor]) -> Update:
        """All micro-batches together."""
        factors = {token: factor for call in self.factors for token, factor in call.items()}
        return Update(factors, sum(self.losses), gradients)

    def __call__(self, **given: Any) -> Any:
        from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

        loss, metrics = compute_policy_loss_vanilla(**given)
        weights, mask = given["rollout_is_weights"], given["response_mask"].bool()
        ones = torch.ones_like(given["log_prob"])
        weights = ones if weights is None else weights
        self.losses.append(float(loss.detach()))
        self.factors.append({})
        # No two rows have one advantage, unless a teacher gave them.
        theirs, name = ("old_log_prob", "old_log_probs") if self.case.distilled else ("advantages", "advantages")
        known = self.case.columns[name][:, 0]
        for line, values in enumerate(given[theirs]):
            row = int((known.to(values.device) - values[mask[line]][0]).abs().argmin())
            for t in range(LENGTHS[row]):
                if mask[line, t]:
                    self.factors[-1][row, t] = float(weights[line, t])
        return loss, metrics


def register_witness(case: Case, monkeypatch: pytest.MonkeyPatch) -> Witness:
    """Register a witness for one test, and restore verl's own registry afterwards."""
    from verl.trainer.ppo import core_algos

    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(core_algos.POLICY_LOSS_REGISTRY))
    witness = Witness(case)
    witness.register()
    return witness


def update_by_engine(worker: Any, witness: Witness, layout: Any, name: str, mode: str, split: Any) -> Update:
    """Run an engine's worker on the batch in ``layout``; ``split`` is the number of rows per micro-batch, or
    dynamic.
    """
    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.worker.loss import OffPolicyLoss
    from recipe.offpolicy.worker.metrics import take_packets

    spec = CorrectionSpec.from_mapping(CORRECTIONS[name])
    dynamic = split == "dynamic"
    metrics, gradients = tw.gradients(
        worker,
        OffPolicyLoss(spec, tw.actor_config(**actor_settings(mode)), extensions=witness.case.extensions),
        layout(witness.case, spec, mode, ROWS),
        micro_batch_size=None if dynamic else split,
        max_token_len=24 if dynamic else None,
        calculate_entropy=True,
        temperature=TEMPERATURE,
    )
    if witness.case.distilled:
        witness.case.check_taught(take_packets(metrics))
    return witness.update(gradients)
