"""ms-swift's own GRPO loss and arguments."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.conformance import Loss, Options, Rows, compare, excerpt, install, our_loss

pytestmark = pytest.mark.extended

STEM = "rollout_importance_sampling"
GRID: dict[str, list[Any]] = {
    f"{STEM}_mode": [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    f"{STEM}_threshold": [1.1, 2.0],
    "off_policy_sequence_mask_delta": [None, 0.03, 0.3],
    "importance_sampling_level": ["token", "sequence", "sequence_token"],
    "loss_type": ["grpo", "bnpo", "dapo", "dr_grpo", "sapo", "cispo"],
    "beta": [0.0],
    "kl_in_reward": [True, None],
}
METHODS = (
    "_compute_loss_and_metrics",
    "_get_rollout_is_correction",
    "_apply_rollout_importance_sampling",
    "_compute_sequence_level_ratios",
    "_compute_off_policy_sequence_mask",
)


def _same(each: Any) -> Any:
    return each


@pytest.fixture(scope="module")
def folder() -> Path:
    return install("ms_swift")


@pytest.fixture(scope="module")
def trainer(folder: Path) -> type:
    """The methods that compute the loss; the rest of the trainer imports model hubs and another release of TRL."""
    path = folder / "swift/rlhf_trainers/grpo_trainer.py"
    given: dict[str, Any] = dict.fromkeys(("gather_object", "nanmin", "nanmax"), _same)
    given |= dict(WINDOW_NORMALIZED_LOSS_TYPES=["cispo", "dapo", "fipo"])
    found = excerpt(path, *(f"GRPOTrainer.{name}" for name in METHODS), GRPOBatch=Any, **given)
    assert f"WINDOW_NORMALIZED_LOSS_TYPES = {given['WINDOW_NORMALIZED_LOSS_TYPES']}" in path.read_text()
    return type("Trainer", (), {name: found[name] for name in METHODS})


def theirs(trainer: type, options: Options, rows: Rows) -> Loss:
    values = {"beta": 0.0, "loss_type": "grpo", "importance_sampling_level": "token", f"{STEM}_mode": None}
    values |= {f"{STEM}_threshold": 2.0, "off_policy_sequence_mask_delta": None} | options
    if values["importance_sampling_level"] != "token" and values["loss_type"] in ("sapo", "cispo"):
        raise ValueError("verl has no such loss")
    here: Any = trainer()
    vars(here).update(values)
    here.epsilon_low, here.epsilon_high = 0.2, 5.0 if values["loss_type"] == "cispo" else 0.2
    here.tau_pos, here.tau_neg = 1.0, 1.05
    here.model = SimpleNamespace(training=True)
    here.args = SimpleNamespace(delta=None, top_entropy_quantile=1.0)
    here.compute_entropy = here.overlong_filter = here._has_teacher = here.log_rollout_offpolicy_metrics = False
    here.disable_rollout_importance_sampling = False
    here.sdar_loss_coef, here.chord_sft_iterator = 0.0, None
    here.max_completion_length = rows.mask.shape[1]
    here.accelerator = SimpleNamespace(num_processes=1, gather_for_metrics=_same)
    here._compute_rollout_offpolicy_metrics = here._compute_is_correction_metrics = lambda *_: {}
    here._undo_gradient_accumulation_scaling = lambda loss: loss
    batch = SimpleNamespace(
        completion_mask=rows.mask,
        truncated_mask=None,
        advantages=rows.advantages,
        old_per_token_logps=rows.old,
        rollout_per_token_logps=rows.mu,
        num_items_in_batch=rows.tokens,
    )

    def compute(pi: Tensor) -> Tensor:
        here._get_per_token_logps_and_entropies = lambda *_, **__: (pi, None)
        return here._compute_loss_and_metrics(None, {}, batch)[0]

    return compute


AGGREGATIONS = {"grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}


def ours(spec: CorrectionSpec, options: Options, rows: Rows) -> Loss:
    loss = options.get("loss_type", "grpo")
    by_row = options.get("importance_sampling_level", "token") != "token"
    mode = loss if loss in ("sapo", "cispo") else "gspo" if by_row else "vanilla"
    changes: dict[str, Any] = {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0} if loss == "cispo" else {}
    if loss == "sapo":
        changes |= {"tau_pos": 1.0, "tau_neg": 1.05}
    return our_loss(spec, rows, mode=mode, aggregation=AGGREGATIONS.get(loss, "token-mean"), **changes)


def test_grpo_loss(trainer: type) -> None:
    compare("ms_swift", GRID, functools.partial(theirs, trainer), ours, draws=1200, always={"beta": 0.0})
