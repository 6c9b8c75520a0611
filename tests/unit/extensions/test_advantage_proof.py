"""What arrives in the workers is held against what was shipped, as multisets of rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from recipe.offpolicy.batch.plan import PLAN, SharedPlan
from recipe.offpolicy.batch.reports import find_difference
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.advantage_proof import AdvantageWorker, name_hashes
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import METRIC_KEY, take_packets
from tests.support import training_worker as tw
from tests.support.corrections import TIS
from tests.support.distilled import rollout
from verl.utils import tensordict_utils as tu


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
