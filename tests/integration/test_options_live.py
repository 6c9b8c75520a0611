"""Every shipped option of the group ``correction`` is proved live at the first update, on a real TrainingWorker."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.batch.plan import PLAN, SharedPlan, compute_constants
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import METRIC_KEY
from tests.support import training_worker as tw
from tests.support.examples import each_nth_by_default
from tests.support.first_update import first_update
from tests.support.presets import VALUES
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig

# What corrects nothing is left out; score centering reads more than the columns of verl's batch:
# test_centering_engine.py.
OPTIONS = {name: values for name, values in VALUES.items() if any(values.values()) and "centering" not in values}
BY_AGE = "loglinear_by_age"
KL_OPTIONS = ("kl_clip", "kl_unbiased")
NEEDS_GPG = [name for name, values in OPTIONS.items() if CorrectionSpec.from_mapping(values).weighs_full_ratio]


def changes(name: str) -> dict[str, Any]:
    if name in KL_OPTIONS:
        return dict(
            use_kl_loss=True,
            kl_loss_coef=0.5,
            kl_loss_type="k3+" if name == "kl_clip" else "low_var_kl",
            tamper=lambda rows: setattr(rows, "ref_log_probs", [old + 0.3 for old in rows.old_log_probs]),
        )
    return dict(policy_loss=PolicyLossConfig(loss_mode="gpg")) if name in NEEDS_GPG else {}


def parts(name: str) -> set[str]:
    """List each weight, mask and other key of an option, without names and numbers."""
    values = dict(OPTIONS[name])
    several = [part for key in ("masks", "weights") for part in values.pop(key, {}).values()]
    return {re.sub(r"\b\d[\d.e-]*", "#", str(part)) for part in (*several, *values.items())}


def new_parts_first() -> list[Any]:
    """Sort the options; the default command runs the options that contain a part which no earlier option has."""
    seen: set[str] = set()
    found = []
    for name in sorted(OPTIONS, key=lambda name: len(parts(name))):
        found.append(pytest.param(name, marks=[pytest.mark.extended] if parts(name) <= seen else []))
        seen |= parts(name)
    return found


@pytest.mark.parametrize("name", new_parts_first())
def test_each_option_is_proved_live(engine: Any, name: str) -> None:
    rollout = tw.make_rollout()
    if name == BY_AGE:
        rollout.versions = [0] * len(rollout.prompts)
    live = first_update(engine, OPTIONS[name], rollout=rollout, **changes(name))
    assert live["proved"] == 1.0
    assert live["shift_error"] < 1e-4


BLOCKS = [
    name
    for name in OPTIONS
    if name not in (*NEEDS_GPG, *KL_OPTIONS, "log_ratio_penalty", BY_AGE) and "verl" not in name
]
# GSPO's own clip, of a mean over the row, removes what these look for: drift against a negative advantage.
INERT_UNDER_GSPO = ("opsm_factored", "slime/opsm")


@pytest.mark.parametrize("name", each_nth_by_default(9, (name for name in BLOCKS if name not in INERT_UNDER_GSPO)))
def test_live_under_the_narrow_clip_of_gspo(engine: Any, name: str) -> None:
    assert under(engine, name, "gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4)["proved"] == 1.0


@pytest.mark.parametrize("name", INERT_UNDER_GSPO)
def test_what_cannot_act_under_gspo_says_so(engine: Any, name: str) -> None:
    with pytest.raises(LivenessError, match="verl's own clip is narrower and the correction changes nothing"):
        under(engine, name, "gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4)


def under(engine: Any, name: str, loss_mode: str, **clip: float) -> dict[str, float]:
    return first_update(engine, OPTIONS[name], policy_loss=PolicyLossConfig(loss_mode=loss_mode), **clip)


def micro_batch(
    spec: CorrectionSpec, lengths: Sequence[int], *, dtype: torch.dtype
) -> tuple[dict[str, Tensor], TensorDict]:
    """(model_output, data) of log-probs alone, padded, as the engine hands them to its loss; rows have two turns."""
    generator = torch.Generator().manual_seed(0)
    rows, width = len(lengths), max(lengths)
    whole = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    mask = whole.clone()
    mask[:, 10:20] = False
    pi = -3 * torch.rand(rows, width, generator=generator) - 0.01
    mu = (pi + 0.02 * torch.randn(rows, width, generator=generator)).to(dtype)
    prompt = torch.ones(rows, 1, dtype=torch.int64)
    columns: dict[str, Any] = {
        "prompts": prompt,
        "responses": torch.ones(rows, width, dtype=torch.int64),
        "attention_mask": torch.cat([prompt, whole.long()], dim=-1),
        "response_mask": mask.long(),
        "old_log_probs": pi.to(dtype) if spec.proximal == "recompute" else mu,
        "rollout_log_probs": mu,
        "advantages": torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous(),
    }
    data = TensorDict(columns, batch_size=rows)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=rows)
    tu.assign_non_tensor(data, **{PLAN: SharedPlan(1, compute_constants(spec, data))})
    # verl's layout: log-probs flat over prompt and response, shifted left by one token.
    flat = [torch.cat([row[:length], row.new_zeros(1)]) for row, length in zip(pi, lengths, strict=True)]
    leaf = torch.cat(flat).to(dtype).requires_grad_()
    return {"log_probs": leaf * 1}, data


@pytest.mark.parametrize(
    ("lengths", "dtype"),
    [((4096, 700, 33, 1), torch.float32), ((2048, 33), torch.bfloat16)],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize(
    "name", each_nth_by_default(13, (name for name in OPTIONS if name not in (*KL_OPTIONS, BY_AGE)))
)
def test_long_rows_and_short_ones_are_proved_alike(name: str, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rounding errors over thousands of tokens must neither look like a dead correction nor hide one."""
    spec = CorrectionSpec.from_mapping(OPTIONS[name])
    model_output, data = micro_batch(spec, lengths, dtype=dtype)
    config = {key: value for key, value in changes(name).items() if key == "policy_loss"}
    loss, metrics = OffPolicyLoss(spec, tw.actor_config(**config), prove=True)(model_output, data)
    loss.backward()
    proof = metrics[METRIC_KEY].proof
    assert proof.gradient_error <= proof.tolerance
    for correction, shift in proof.shifts.items():
        assert shift.error <= proof.tolerance, correction
        # REINFORCE reads no pi_old, see proof/verify.py.
        assert shift.vacuous == (correction == "proximal" and name in NEEDS_GPG), correction
