"""A micro-batch as an extension sees it inside the loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

from recipe.offpolicy.batch.plan import PLAN, SharedPlan
from recipe.offpolicy.batch.seals import find_difference
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.advantage_proof import AdvantageWorker, name_hashes
from recipe.offpolicy.extensions.batch_view import LossRows
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import METRIC_KEY, take_packets
from tests.support import training_worker as tw
from tests.support.corrections import TIS
from tests.support.distilled import rollout
from verl.utils import tensordict_utils as tu


def nested(*rows: list[float]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def rows(*, with_padding: bool = True, **columns: torch.Tensor) -> LossRows:
    """A row of two tokens, and one that verl added as padding; each has a prompt of one token."""
    given = {"prompts": nested([7], [7]), "responses": nested([8, 9], [8]), "response_mask": nested([1, 1], [0])}
    data = TensorDict({**given, **columns}, batch_size=2)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=4, global_batch_size=2)
    return LossRows({"log_probs": nested([-1.0, -2.0, 0.0], [-3.0, 0.0])}, data, with_padding=with_padding)


def test_columns_by_token_and_by_row_are_padded() -> None:
    seen = rows(offpolicy_teacher=nested([0.5, 0.25], [4.0]), offpolicy_score=torch.tensor([1.0, 2.0]))
    assert seen.log_prob.tolist() == [[-1.0, -2.0], [-3.0, 0.0]]
    assert seen.response_mask.tolist() == [[True, True], [False, False]]
    assert seen.column("offpolicy_teacher").tolist() == [[0.5, 0.25], [4.0, 0.0]]
    assert seen.column("offpolicy_score").tolist() == [1.0, 2.0]
    assert "offpolicy_score" in seen


def test_the_mean_is_the_mini_batchs() -> None:
    config = SimpleNamespace(loss_agg_mode="token-mean", loss_scale_factor=None)
    # 1 + 2 over the 4 tokens of the mini-batch; padding does not count.
    assert rows().mean(torch.tensor([[1.0, 2.0], [9.0, 9.0]]), config).item() == pytest.approx(0.75)


def test_a_column_that_did_not_arrive() -> None:
    with pytest.raises(KeyError, match="offpolicy_teacher is not in the micro-batch"):
        rows().column("offpolicy_teacher")


# What arrives in the workers is held against what was shipped, as multisets of rows


@pytest.mark.verl(">=0.8")
@pytest.mark.parametrize("spec", [CorrectionSpec(), CorrectionSpec.from_mapping({"weight": TIS})], ids=["none", "tis"])
def test_the_workers_loss_reports_the_rows_that_came(spec: CorrectionSpec) -> None:
    """On the engine's own layout, nested by row, next to the padded one of the trainer."""
    made, flat, whole = rollout()
    data = made.to_tensordict()
    tokens = int(data["response_mask"].values().sum())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=6, **{PLAN: SharedPlan(1)})
    loss = OffPolicyLoss(spec, tw.actor_config(), extensions={"x": AdvantageWorker()})
    offsets = torch.tensor([0, *whole]).cumsum(0)
    log_probs = torch.nested.nested_tensor_from_jagged(flat.clone().requires_grad_(), offsets)
    _, metrics = loss({"log_probs": log_probs}, data)
    (packet,) = take_packets({METRIC_KEY: metrics[METRIC_KEY]})
    names = ("responses", "response_mask", "advantages")
    columns = {name: pad_sequence(getattr(made, name), batch_first=True) for name in names}
    view: Any = SimpleNamespace(keys="abcdef")
    shipped = name_hashes(view, columns["responses"], columns["response_mask"].bool(), columns["advantages"])
    assert len(shipped) == 6
    assert find_difference(shipped, packet.reports["x"].hashes) is None
