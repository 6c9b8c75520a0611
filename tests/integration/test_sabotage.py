"""Any fault that disconnects a correction stops the run at the first update; on a real verl TrainingWorker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from recipe.offpolicy.batch import micro_batch
from recipe.offpolicy.correction import CorrectionSpec, StepStage
from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import METRIC_KEY
from tests.support import first_update as shared
from tests.support import training_worker as tw
from tests.support.specs import GSM, OPSM, STALENESS, TIS_TOKEN
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

MISMATCH = shared.MISMATCH
SPEC: dict[str, Any] = {"weight": TIS_TOKEN, "masks": {"gsm": GSM, "opsm": OPSM, "staleness": STALENESS}}


def first_update(worker: Any, *, mapping: dict[str, Any] = SPEC, loss: Any = None, **kwargs: Any) -> dict[str, float]:
    """Run one update and return its verdict."""
    return shared.first_update(worker, mapping, loss=loss or adapter(spec=mapping), **kwargs)


def adapter(hand_over: Any = None, spec: Any = SPEC, **config: Any) -> Any:
    """The loss as installed, or with another hand-over."""

    class Sabotaged(OffPolicyLoss):
        def hand_over(self, batch: Any, step: StepStage) -> Any:
            data = super().hand_over(batch, step)
            if hand_over is not None:
                data["rollout_is_weights"] = hand_over(batch, step)
            return data

    return Sabotaged(CorrectionSpec.from_mapping(spec), tw.actor_config(**config), prove=True)


@pytest.mark.parametrize(
    ("mismatch", "micro_batch_size"),
    [(MISMATCH, 2), (1e-6, None), pytest.param(1e-6, 1, marks=pytest.mark.extended)],
)
def test_untouched_it_is_live(engine: Any, mismatch: float, micro_batch_size: int | None) -> None:
    live = first_update(engine, mismatch=mismatch, micro_batch_size=micro_batch_size)
    assert live["proved"] == 1.0
    assert live["rows"] == 8.0
    assert live["gradient_tokens"] > 0
    assert live["gradient_error"] < 1e-5
    assert live["shift_error"] < 1e-5


@pytest.mark.parametrize("loss_mode", ["dppo_tv", "sapo"])
def test_live_with_other_base_losses(engine: Any, loss_mode: str) -> None:
    assert first_update(engine, loss=adapter(policy_loss=PolicyLossConfig(loss_mode=loss_mode)))["proved"] == 1.0


def test_no_gradient_is_not_a_proof(engine: Any) -> None:
    def no_advantage(rows: tw.Rollout) -> None:
        rows.advantages = [torch.zeros_like(a) for a in rows.advantages]

    live = first_update(engine, tamper=no_advantage)
    assert live["proved"] == 0.0
    assert live["gradient_tokens"] == 0.0


def stops(match: str, engine: Any, **kwargs: Any) -> None:
    with pytest.raises(LivenessError, match=match):
        first_update(engine, **kwargs)


def test_adapter_switched_off(engine: Any) -> None:
    stops("the worker ran another loss function", engine, loss=partial(ppo_loss, config=tw.actor_config()))


def test_proof_switched_off(engine: Any) -> None:
    loss = adapter()
    loss.prove = False
    stops("have no proof", engine, loss=loss)


@pytest.mark.parametrize("change", [{"masks": {}}, {"weight": TIS_TOKEN | {"upper": 1.3}}])
def test_spec_altered_on_the_worker(engine: Any, change: dict[str, Any]) -> None:
    stops("a different spec", engine, loss=adapter(spec=SPEC | change))


def test_mu_replaced_by_pi_old_at_the_source(engine: Any) -> None:
    def replace(rows: tw.Rollout) -> None:
        rows.rollout_log_probs = rows.old_log_probs

    stops("allow_identical_log_probs=true", engine, tamper_source=replace)
    assert first_update(engine, tamper_source=replace, allow_identical=True)["proved"] == 1.0


def rolled(by: int) -> Callable[[tw.Rollout], None]:
    def shift(rows: tw.Rollout) -> None:
        rows.rollout_log_probs = [mu.roll(by) for mu in rows.rollout_log_probs]

    return shift


def permute(rows: tw.Rollout) -> None:
    """Exchange mu of two rows of the same length."""
    lengths = [len(mu) for mu in rows.rollout_log_probs]
    first, second = next((i, j) for i in range(8) for j in range(i) if lengths[i] == lengths[j])
    mu = rows.rollout_log_probs
    mu[first], mu[second] = mu[second], mu[first]


@pytest.mark.parametrize(("change", "match"), [(rolled(1), "8 of 8 sequences"), (permute, "2 of 8 sequences")])
def test_mu_changed_on_the_way(engine: Any, change: Any, match: str) -> None:
    stops(f"not use the mu that the rollout sampled: {match}", engine, tamper=change)


@pytest.mark.parametrize("by", [1, -1])
def test_mu_shifted_by_one_token_at_the_source(engine: Any, by: int) -> None:
    stops("off by one token", engine, tamper_source=rolled(by))
    # Where pi_old is mu itself, the current policy tells.
    of_mu = {"proximal": "bypass", "masks": {"opsm": OPSM}}
    stops("off by one token", engine, tamper_source=rolled(by), mapping=of_mu)


def test_log_probs_of_the_engine_are_of_other_rows(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = micro_batch.read

    def misread(model_output: Any, data: Any) -> Any:
        batch = read(model_output, data)
        return replace(batch, log_prob=batch.log_prob.flip(0))

    monkeypatch.setattr(micro_batch, "read", misread)
    stops("log pi of the training engine, or pi_old, belongs to other sequences", engine)


def undetached(batch: Any, step: StepStage) -> torch.Tensor:
    # Equal in value, but the ratio's own gradient comes along.
    return step.weight * step.keep * torch.exp(batch.log_prob - batch.log_prob.detach())


@pytest.mark.parametrize(
    ("hand_over", "mismatch"),
    [
        pytest.param(lambda batch, step: step.weight, 1e-6, id="keep not applied, seen by the shift alone"),
        pytest.param(lambda batch, step: step.weight**2 * step.keep, MISMATCH, id="weight applied twice"),
        pytest.param(lambda batch, step: step.keep.float(), 1e-6, id="weight not applied, seen by the shift alone"),
        pytest.param(undetached, MISMATCH, id="weight not detached"),
        pytest.param(lambda batch, step: (step.weight * step.keep).roll(1, 0), MISMATCH, id="weights of other rows"),
    ],
)
def test_weights_handed_over_wrongly(engine: Any, hand_over: Any, mismatch: float) -> None:
    stops("gradient", engine, loss=adapter(hand_over), mismatch=mismatch)


Change = Callable[[CorrectionSpec, Any], tuple[CorrectionSpec, Any]]


def each_mask(**changes: Any) -> Change:
    return lambda spec, batch: (
        replace(spec, masks=tuple((name, replace(mask, **changes)) for name, mask in spec.masks)),
        batch,
    )


def each_weight(**changes: Any) -> Change:
    def change(spec: CorrectionSpec, batch: Any) -> tuple[CorrectionSpec, Any]:
        weight = spec.weight and replace(spec.weight, **changes)
        return replace(spec, weight=weight, weights=tuple((n, replace(w, **changes)) for n, w in spec.weights)), batch

    return change


def reads(column: str, read: Callable[[Any], torch.Tensor]) -> Change:
    return lambda spec, batch: (spec, replace(batch, **{column: read(batch)}))


WEIGHTS: dict[str, Any] = {
    "weights": {"a": TIS_TOKEN | {"when": "negative"}, "b": TIS_TOKEN | {"when": "positive", "upper": 1.1}}
}
DECISIONS: dict[str, tuple[dict[str, Any], Change]] = {
    "sum instead of mean": (SPEC, each_mask(aggregate="product")),
    "wrong sign of the advantage": (SPEC, each_mask(when="positive")),
    "a wider band": (SPEC, each_mask(lower=0.5, upper=None, delta=None)),
    "no weight": (SPEC, lambda spec, batch: (replace(spec, weight=None), batch)),
    "product instead of token weights": (SPEC, each_weight(level="sequence")),
    "weights whatever the advantage": (WEIGHTS, lambda spec, batch: each_weight(when="any")(keep_first(spec), batch)),
    "weights by the sign of each token": (WEIGHTS, each_weight(sign="token")),
    "pi_old replaced by pi": (SPEC, reads("old_log_prob", lambda batch: batch.log_prob.detach())),
    "pi of other rows": (SPEC, reads("log_prob", lambda batch: batch.log_prob.flip(0))),
    "pi_old of other rows": (SPEC, reads("old_log_prob", lambda batch: batch.old_log_prob.flip(0))),
    "mu of other rows": (SPEC, reads("rollout_log_prob", lambda batch: batch.rollout_log_prob.flip(0))),
}
"""Bugs in the stages, which no fingerprint detects."""


def keep_first(spec: CorrectionSpec) -> CorrectionSpec:
    return replace(spec, weights=spec.weights[:1])


@pytest.mark.parametrize("name", DECISIONS)
def test_the_stages_decide_something_else(engine: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    decide, (mapping, change) = micro_batch.decide, DECISIONS[name]
    monkeypatch.setattr(micro_batch, "decide", lambda spec, batch, **options: decide(*change(spec, batch), **options))
    stops("has no effect|no evidence that", engine, mapping=mapping, micro_batch_size=None)


PENALTY: dict[str, Any] = {"masks": {"gsm": GSM}, "penalty": {"ratio": "full", "coefficient": 0.01}}


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(lambda squares, batch: squares.detach(), id="without a gradient"),
        pytest.param(lambda squares, batch: squares * (batch.advantages > 0), id="masked"),
    ],
)
def test_a_penalty_that_is_another(engine: Any, monkeypatch: pytest.MonkeyPatch, tamper: Any) -> None:
    from recipe.offpolicy.worker import loss, terms

    true = terms.compute_penalty
    monkeypatch.setattr(loss, "compute_penalty", lambda spec, batch, whole: tamper(true(spec, batch, whole), batch))
    stops("penalty has no effect|gradient", engine, mapping=PENALTY)


def corrupted_installation(kind: str) -> Any:
    """The installed loss after its entry was changed, so the engine no longer calls the loss that was handed over."""

    class Corrupted(OffPolicyLoss):
        def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
            loss, metrics = super().__call__(model_output, data, dp_group)
            if kind == "loss times zero":
                loss = loss * 0.0
            elif kind == "verl's loss instead":
                loss = self.base_loss(model_output, data, dp_group)[0]
            elif kind == "only while proving" and not self.prove:
                plain = self.base_loss(model_output, data, dp_group)[0]
                return plain, {METRIC_KEY: metrics[METRIC_KEY]}
            return loss, metrics

        def compute_corrected(self, *args: Any) -> Any:
            if kind != "another spec in the call":
                return super().compute_corrected(*args)
            mine, self.spec = self.spec, CorrectionSpec()
            try:
                return super().compute_corrected(*args)
            finally:
                self.spec = mine

    return Corrupted(CorrectionSpec.from_mapping(SPEC), tw.actor_config(), prove=True)


@pytest.mark.parametrize(
    ("kind", "match", "mismatch"),
    [
        ("loss times zero", "scaled it by zero", MISMATCH),
        ("verl's loss instead", "did not go through", 1e-3),
        ("only while proving", "has no effect", MISMATCH),
        ("another spec in the call", "gradient|has no effect", 1e-3),
    ],
)
def test_the_installed_call_is_corrupted(engine: Any, kind: str, match: str, mismatch: float) -> None:
    stops(match, engine, loss=corrupted_installation(kind), mismatch=mismatch)


def test_verl_drops_the_weights(engine: Any) -> None:
    """Do what verl's list of known keys would do to an unknown key."""

    def dropping(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        return ppo_loss(config, model_output, data.exclude("rollout_is_weights"), dp_group)

    loss = OffPolicyLoss(CorrectionSpec.from_mapping(SPEC), tw.actor_config(), prove=True, base_loss=dropping)
    stops("no evidence that|gradient", engine, loss=loss)


def test_verls_own_weights_are_already_there(engine: Any) -> None:
    rows = tw.add_log_probs(engine, tw.make_rollout(), mismatch=MISMATCH)
    data = rows.to_tensordict()
    data["rollout_is_weights"] = torch.nested.as_nested_tensor(
        [torch.ones_like(mu) for mu in rows.rollout_log_probs], layout=torch.jagged
    )
    with pytest.raises(ValueError, match=r"algorithm\.rollout_correction"):
        tw.update(engine, adapter(), data)


def test_rejecting_everything_is_a_proof(engine: Any) -> None:
    """No gradient is left, as it must be; the correction is live, and the kept share is 0."""
    far = {"masks": {"gsm": GSM | {"lower": 1.0, "upper": 1.0}}}
    live = first_update(engine, mapping=far)
    assert live["proved"] == 1.0
    assert live["gradient_tokens"] > 0
