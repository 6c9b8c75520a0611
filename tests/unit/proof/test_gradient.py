"""The worker's evidence from one micro-batch, with an explicit loss: -sum of ratio x advantage x weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from recipe.offpolicy.batch import micro_batch as mb
from recipe.offpolicy.batch.plan import PLAN, SharedPlan
from recipe.offpolicy.batch.weight_versions import CHUNKS
from recipe.offpolicy.correction import CorrectionSpec, weights
from recipe.offpolicy.correction.row_layout import PaddedRows
from recipe.offpolicy.correction.units import Units
from recipe.offpolicy.proof.gradient import Proof, prove
from tests.support.corrections import TIS, band, opsm, spec

MASKED = spec(TIS, narrow=band(0.9, 1.1, level="token", aggregate="product"))


def policy_loss(model_output: Mapping[str, Any], data: TensorDict) -> tuple[Tensor, dict[str, Any]]:
    ratio = (mb.pad_log_probs(model_output, data) - data["old_log_probs"]).exp()
    return -(ratio * data["advantages"] * data[mb.WEIGHTS] * data["response_mask"]).sum(), {}


@dataclass
class Adapter:
    """A loss that corrects if ``alive``."""

    spec: CorrectionSpec
    alive: bool = True
    prove: bool = True
    shadows: dict[str, CorrectionSpec] = field(default_factory=dict)
    moving: dict[str, Any] = field(default_factory=dict)
    extensions: dict[str, Any] = field(default_factory=dict)
    verl_loss: Any = policy_loss
    base_loss: Any = policy_loss

    def extended(self, base_loss: Any) -> Any:
        return base_loss

    def __call__(self, model_output: Mapping[str, Any], data: TensorDict) -> tuple[Tensor, dict[str, Any]]:
        batch = mb.read(model_output, data)
        factor = mb.compute_factor(self.spec, batch, mb.decide(self.spec, batch, measure="nothing"))
        handed = {mb.WEIGHTS: factor if self.alive else torch.ones_like(factor), "old_log_probs": batch.old_log_prob}
        return policy_loss(model_output, batch.data_with(**handed))


def evidence(adapter: Adapter, *, scale: float = 1.0, advantage: float = 1.0, tokens: int = 1, last: int = 1) -> Proof:
    """Two rows of three tokens; in the first row, the ratios pi_old / mu are 1.5, 1 and 3."""
    mask = torch.full((2, 3), tokens)
    mask[:, -1] *= last
    mu = torch.full((2, 3), -2.0)
    old = mu + torch.tensor([[1.5, 1.0, 3.0], [1.0, 1.05, 1.0]]).log()
    columns = {"responses": mask, "response_mask": mask, "advantages": torch.full((2, 3), advantage)}
    data = TensorDict({**columns, "old_log_probs": old, mb.ROLLOUT_LOG_PROBS: mu}, batch_size=2)
    output = {"log_probs": old.clone().requires_grad_() * 1.0}
    loss, _ = adapter(output, data)
    proof = prove(adapter, mb.read(output, data), loss)
    if loss.requires_grad:
        (loss * scale).backward()
    return proof


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_live_correction(scale: float) -> None:
    proof = evidence(Adapter(MASKED), scale=scale)
    assert (proof.tokens, proof.gradient_tokens, proof.log_prob_bits) == (6, 6, 32)
    # mu and pi_old agree where the ratio is 1.
    assert proof.identical_tokens == 3
    assert proof.gradient_error is not None
    assert proof.gradient_error < 1e-5
    assert {name: shift.vacuous for name, shift in proof.shifts.items()} == {"weight": False, "masks.narrow": False}
    assert max(shift.error for shift in proof.shifts.values()) < proof.tolerance == 1e-4


def test_rows_without_a_token_are_not_proved() -> None:
    proof = evidence(Adapter(MASKED), tokens=0)
    assert (proof.tokens, proof.shifts, proof.gradient_error) == (0, {}, None)


def test_mu_off_by_one_token_shows_in_the_distances() -> None:
    before, same, after = evidence(Adapter(MASKED)).distances
    # Only the middle token has two neighbours; mu is -2 everywhere, and pi_old there -2 and -2 + log 1.05.
    assert (before, same, after) == pytest.approx((0.04879,) * 3, rel=1e-3)
    assert evidence(Adapter(MASKED), last=0).distances == (0.0, 0.0, 0.0)


# Age --------------------------------------------------------------------------------------------------------


STALE = {"aggregate": "staleness", "level": "turn", "upper": 1}
BY_AGE = band(0.9, 1.1, level="token", aggregate="product", by_staleness=[1.0, 1.5])


def aged_evidence(correction: CorrectionSpec) -> Proof:
    """Rows of two turns at step 9, the first sampled by versions 5 and 8, the second by version 8."""
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]])
    old = torch.full((2, 4), -2.0)
    columns = {"responses": mask, "response_mask": mask, "advantages": torch.ones(2, 4), "old_log_probs": old}
    turns = [[[(5, 1), (8, 1)], [(8, 1)]], [[(8, 3)]]]
    fields = [{"min_global_steps": row[0][0][0], "max_global_steps": 8, CHUNKS: row} for row in turns]
    data = TensorDict(
        {**columns, mb.ROLLOUT_LOG_PROBS: old - 0.01, "extra_fields": NonTensorStack(*fields)}, batch_size=2
    )
    data[PLAN] = NonTensorData(SharedPlan(9), batch_size=[2])
    output = {"log_probs": old.clone().requires_grad_() * 1.0}
    adapter = Adapter(correction)
    loss, _ = adapter(output, data)
    proof = prove(adapter, mb.read(output, data), loss)
    loss.backward()
    return proof


def dead_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Units, "oldest", property(lambda units: units.greatest(torch.zeros_like(units.valid).double())))


def age_of_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Units, "oldest", property(lambda units: -units.greatest(-units.ages)))


def dropped_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Units, "scale_limit", lambda units, limit, factors, power: limit)
    monkeypatch.setattr(weights, "choose_bounds", lambda part, units: (part.lower, part.upper))


def factors_of_the_next_age(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Units.choose_by_age
    monkeypatch.setattr(
        Units, "choose_by_age", lambda units, values, dtype: choose(units, [*values[1:], values[-1]], dtype)
    )


CASES = {
    "stale": spec(stale=STALE),
    "stale and negative": spec(stale=STALE | {"when": "negative", "level": "token"}),
    "mask": spec(narrow=BY_AGE),
    "one-sided mask": spec(far=opsm(0.02, when="any", ratio="rollout", by_staleness=[1.0, 0.5])),
    "cap": spec(TIS | {"by_staleness": [1.0, 1.05]}),
    "rejecting weight": spec(TIS | {"kind": "reject", "level": "sequence", "by_staleness": [1.0, 1.05]}),
}


# Prefixes ---------------------------------------------------------------------------------------------------

PREFIX: dict[str, Any] = TIS | {"level": "prefix"}
PREFIX_CASES = {
    "prefix": spec(PREFIX),
    "root": spec(PREFIX | {"aggregate": "geometric"}),
    "minimum": spec(PREFIX | {"aggregate": "minimum"}),
    "by position": spec(PREFIX | {"kind": "clip", "lower": 0.9, "upper": 1.2, "by_position": 0.5}),
    "prefix mask": spec(m=band(0.9, 1.1, level="prefix", aggregate="product")),
    "veto": spec(m=band(0.3, None, level="prefix", aggregate="any", when="negative")),
    "mean of KL": spec(m=band(None, 0.01, level="prefix", aggregate="binary_kl_forward_mean")),
}


def whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cumulative_sum", "cumulative_max"):
        reduce = {"cumulative_sum": PaddedRows.sum, "cumulative_max": PaddedRows.max}[name]
        monkeypatch.setattr(PaddedRows, name, lambda rows, tokens, by=reduce: by(rows, tokens).expand(tokens.shape))


def single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cumulative_sum", "cumulative_max"):
        monkeypatch.setattr(PaddedRows, name, lambda rows, tokens: tokens.double())


def one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "choose_bounds", lambda part, units: (part.lower, part.upper))


def no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Units, "least_before", lambda units, values: torch.zeros_like(values))


FAULTS = [
    ("stale", dead_age),
    ("stale", age_of_the_newest),
    ("stale and negative", dead_age),
    *((name, fault) for name in list(CASES)[2:] for fault in (dropped_factors, factors_of_the_next_age)),
    ("mask", dead_age),
    ("rejecting weight", age_of_the_newest),
    *((name, fault) for name in PREFIX_CASES if name != "minimum" for fault in (whole_rows, single_tokens)),
    ("by position", one_width),
    ("minimum", no_prefix),
]
EVERY_CASE = CASES | PREFIX_CASES


@pytest.mark.parametrize("name", EVERY_CASE)
def test_what_goes_by_age_or_prefix_is_proved(name: str) -> None:
    proof = aged_evidence(EVERY_CASE[name])
    assert all(shift.error < 1e-5 and not shift.vacuous for shift in proof.shifts.values())


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_what_does_not_go_by_it_is_found(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    proof = aged_evidence(EVERY_CASE[name])
    assert all(shift.error > 1e-2 > proof.tolerance for shift in proof.shifts.values())
