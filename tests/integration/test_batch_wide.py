"""Batch-level constants do not depend on how the batch is split; tested on a real verl TrainingWorker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recipe.offpolicy.batch.plan import count_kept
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.decisions import HAS_DENOMINATOR
from tests.support import training_worker as tw
from tests.support.first_update import adapter, planned
from tests.support.specs import GSM, TIS_TOKEN

M2PO = {"ratio": "rollout", "level": "token", "aggregate": "second_moment", "budget": 0.01, "when": "any"}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "self-normalised by row": {"weight": TIS_TOKEN | {"level": "sequence", "upper": 5.0, "normalize": True}},
    "all": {
        "weight": TIS_TOKEN | {"kind": "reject", "lower": 0.8, "upper": 1.25, "normalize": True},
        "masks": {"gsm": GSM, "m2po": M2PO},
        "denominator": "kept",
    },
}


def gradients(engine: Any, mapping: dict[str, Any], mode: str, micro_batch_size: int) -> dict[str, torch.Tensor]:
    spec = CorrectionSpec.from_mapping(mapping)
    data = planned(spec, tw.add_log_probs(engine, tw.make_rollout(), mismatch=0.2), loss_agg_mode=mode)
    constant = {"loss_scale_factor": 7} if mode == "seq-mean-token-sum-norm" else {}
    loss = adapter(mapping, prove=False, loss_agg_mode=mode, **constant)
    return tw.gradients(engine, loss, data, micro_batch_size=micro_batch_size)[1]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("self-normalised by row", "token-mean"),
        *(("all", mode) for mode in HAS_DENOMINATOR),
    ],
)
def test_split_into_micro_batches_changes_nothing(engine: Any, name: str, mode: str) -> None:
    whole, single = (gradients(engine, CORRECTIONS[name], mode, size) for size in (8, 2))
    assert tw.close(single, whole, 2e-5)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_kept_is_the_gradient_of_a_batch_without_the_rejected_rows(engine: Any, mode: str) -> None:
    """Training only the rows that the mask keeps, with verl's own loss, gives the same gradient."""
    spec = CorrectionSpec.from_mapping({"masks": {"gsm": GSM}, "denominator": "kept"})
    rows = tw.add_log_probs(engine, tw.make_rollout(), mismatch=0.2)
    _, kept = count_kept(spec, rows.to_tensordict())
    left = [row for row, some in enumerate(kept.tolist()) if some]
    assert 0 < len(left) < 8
    ours = gradients(engine, {"masks": {"gsm": GSM}, "denominator": "kept"}, mode, 4)

    alone = tw.Rollout(**{name: [column[row] for row in left] for name, column in vars(rows).items() if column})
    verls = tw.gradients(engine, tw.plain_loss(loss_agg_mode=mode), alone.to_tensordict(), micro_batch_size=len(left))[
        1
    ]
    assert tw.close(ours, verls, 2e-5)


@pytest.mark.parametrize(
    ("mode", "denominator"),
    [
        ("token-sum", "original"),  # divides by nothing, so that kept is refused at start-up
        ("token-mean", "kept"),
        ("seq-mean-token-mean", "kept"),
    ],
)
def test_a_batch_that_is_rejected_altogether_is_exactly_zero(engine: Any, mode: str, denominator: str) -> None:
    nothing = {"masks": {"none_kept": GSM | {"lower": 1e-8, "upper": 1e-7}}, "denominator": denominator}
    for gradient in gradients(engine, nothing, mode, 2).values():
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_shadows_touch_no_gradient(engine: Any) -> None:
    weight = {"weight": TIS_TOKEN}
    shadows = {
        "gsm": CorrectionSpec.from_mapping({"masks": {"gsm": GSM}}),
        "kept_none": CorrectionSpec.from_mapping({"masks": {"none_kept": GSM | {"lower": 1e-8, "upper": 1e-7}}}),
    }
    rows = tw.add_log_probs(engine, tw.make_rollout(), mismatch=0.2)
    data = planned(CorrectionSpec.from_mapping(weight), rows)
    plain = tw.gradients(engine, adapter(weight, prove=False), data)[1]
    metrics, shadowed = tw.gradients(engine, adapter(weight, prove=False, shadows=shadows), data)
    assert tw.equal(plain, shadowed)
    seen = tw.measured(metrics)
    assert 0.0 < seen["shadow/gsm/keep_sequence_share"] < 1.0
    assert seen["shadow/kept_none/keep_token_share"] == 0.0
    assert seen["keep/token_share"] == 1.0
