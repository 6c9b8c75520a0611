"""Whatever disconnects a correction stops the run at the first update; on a real verl TrainingWorker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec, StepStage
from tests.support import first_update as shared
from tests.support import training_worker as tw
from tests.support.specs import GSM, OPSM, STALENESS, TIS_TOKEN

MISMATCH = shared.MISMATCH
SPEC: dict[str, Any] = {"weight": TIS_TOKEN, "masks": {"gsm": GSM, "opsm": OPSM, "staleness": STALENESS}}


def first_update(worker: Any, *, mapping: dict[str, Any] = SPEC, loss: Any = None, **kwargs: Any) -> dict[str, float]:
    """One update and its verdict."""
    return shared.first_update(worker, mapping, loss=loss or adapter(spec=mapping), **kwargs)


def adapter(hand_over: Any = None, spec: Any = SPEC, **config: Any) -> Any:
    """The loss as installed, or with its hand-over replaced."""
    from recipe.offpolicy.worker.loss import OffPolicyLoss

    class Sabotaged(OffPolicyLoss):
        def hand_over(self, batch: Any, step: StepStage) -> Any:
            data = super().hand_over(batch, step)
            if hand_over is not None:
                data["rollout_is_weights"] = hand_over(batch, step)
            return data

    return Sabotaged(CorrectionSpec.from_mapping(spec), tw.actor_config(**config), prove=True)


@pytest.mark.parametrize("micro_batch_size", [1, 2, None])
@pytest.mark.parametrize("mismatch", [MISMATCH, 1e-6])
def test_untouched_it_is_live(engine: Any, mismatch: float, micro_batch_size: int | None) -> None:
    live = first_update(engine, mismatch=mismatch, micro_batch_size=micro_batch_size)
    assert live["proved"] == 1.0
    assert live["rows"] == 8.0
    assert live["gradient_tokens"] > 0
    assert live["gradient_error"] < 1e-5
    assert live["shift_error"] < 1e-5


@pytest.mark.parametrize(
    "mapping",
    [
        {"weight": TIS_TOKEN | {"level": "sequence", "upper": 5.0}},
        {"weight": TIS_TOKEN | {"upper": None}},
        {"weight": TIS_TOKEN | {"level": "sequence", "upper": None}},
        {"weight": TIS_TOKEN | {"kind": "clip", "lower": 0.5, "upper": 2.0}},
        {"weight": TIS_TOKEN | {"lower": 0.8, "upper": None}},
        {"masks": {"product": GSM | {"aggregate": "product", "lower": 0.5, "upper": 2.0}}},
        {"masks": {"one_sided": GSM | {"lower": None}}},
        {"masks": {"positive": GSM | {"ratio": "ppo", "lower": None, "upper": 1.05, "when": "positive"}}},
        {"masks": {"at_once": OPSM | {"delta": 0.0}}},
        {"masks": {"trl": OPSM | {"delta": 0.5}, "late": STALENESS | {"delta": 0.5}}},
    ],
    ids=lambda mapping: str(mapping)[:60],
)
def test_every_shape_of_a_correction_can_be_proved(engine: Any, mapping: dict[str, Any]) -> None:
    assert first_update(engine, mapping=mapping)["shift_error"] < 1e-5


@pytest.mark.parametrize("loss_mode", ["gspo", "cispo", "gpg", "dppo_tv", "sapo"])
def test_live_with_other_base_losses(engine: Any, loss_mode: str) -> None:
    from verl.workers.config import PolicyLossConfig

    assert first_update(engine, loss=adapter(policy_loss=PolicyLossConfig(loss_mode=loss_mode)))["proved"] == 1.0


def test_live_under_the_narrow_clip_of_gspo(engine: Any) -> None:
    """GSPO clips at 3e-4: the proof must not lose its gradient to the base loss's own clip."""
    from verl.workers.config import PolicyLossConfig

    mapping = {"weight": TIS_TOKEN, "masks": {"gsm": GSM, "opsm": OPSM | {"delta": 0.5}}}
    gspo = {"policy_loss": PolicyLossConfig(loss_mode="gspo"), "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    live = first_update(engine, mapping=mapping, loss=adapter(spec=mapping, **gspo))
    assert live["proved"] == 1.0
    assert live["shift_error"] < 1e-5


def test_live_beside_kl(engine: Any) -> None:
    # KL adds a gradient that no weight touches; the prediction has to know it.
    from recipe.offpolicy.proof.verify import verify
    from recipe.offpolicy.worker.metrics import take_packets
    from tests.support.sampled_rows import compute_sampled_checksums

    rows = tw.add_log_probs(engine, tw.make_rollout(), mismatch=MISMATCH)
    data = rows.to_tensordict()
    data["ref_log_prob"] = torch.nested.as_nested_tensor([o + 0.3 for o in rows.old_log_probs], layout=torch.jagged)
    metrics, _ = tw.gradients(engine, adapter(use_kl_loss=True, kl_loss_coef=0.5), data)
    live = verify(
        take_packets(metrics), CorrectionSpec.from_mapping(SPEC), sampled_rows=compute_sampled_checksums(data)
    )
    assert live["proved"] == 1.0


def test_no_gradient_is_not_a_proof(engine: Any) -> None:
    def no_advantage(rows: tw.Rollout) -> None:
        rows.advantages = [torch.zeros_like(a) for a in rows.advantages]

    live = first_update(engine, tamper=no_advantage)
    assert live["proved"] == 0.0
    assert live["gradient_tokens"] == 0.0


def stops(match: str, engine: Any, **kwargs: Any) -> None:
    from recipe.offpolicy.proof.verify import LivenessError

    with pytest.raises(LivenessError, match=match):
        first_update(engine, **kwargs)


def test_adapter_switched_off(engine: Any) -> None:
    from verl.workers.utils.losses import ppo_loss

    stops("the worker ran another loss function", engine, loss=partial(ppo_loss, config=tw.actor_config()))


def test_proof_switched_off(engine: Any) -> None:
    loss = adapter()
    loss.prove = False
    stops("without a proof", engine, loss=loss)


@pytest.mark.parametrize("change", [{"weight": None}, {"masks": {}}, {"weight": SPEC["weight"] | {"upper": 1.3}}])
def test_spec_altered_on_the_worker(engine: Any, change: dict[str, Any]) -> None:
    stops("a different spec", engine, loss=adapter(spec=SPEC | change))


def test_mu_replaced_by_pi_old_on_the_way(engine: Any) -> None:
    def replace(rows: tw.Rollout) -> None:
        rows.rollout_log_probs = rows.old_log_probs

    stops("not use the mu that the rollout sampled", engine, tamper=replace)


def test_mu_replaced_by_pi_old_at_the_source(engine: Any) -> None:
    def replace(rows: tw.Rollout) -> None:
        rows.rollout_log_probs = rows.old_log_probs

    stops("allow_identical_log_probs=true", engine, tamper_source=replace)
    assert first_update(engine, tamper_source=replace, allow_identical=True)["proved"] == 1.0


def test_mu_shifted_by_one_token(engine: Any) -> None:
    def shift(rows: tw.Rollout) -> None:
        rows.rollout_log_probs = [mu.roll(1) for mu in rows.rollout_log_probs]

    stops("not use the mu that the rollout sampled", engine, tamper=shift)


@pytest.mark.parametrize("by", [1, -1])
def test_mu_shifted_by_one_token_at_the_source(engine: Any, by: int) -> None:
    def shift(rows: tw.Rollout) -> None:
        rows.rollout_log_probs = [mu.roll(by) for mu in rows.rollout_log_probs]

    stops("off by one token", engine, tamper_source=shift)
    # Where pi_old is mu itself, the current policy tells.
    stops("off by one token", engine, tamper_source=shift, mapping={"proximal": "bypass", "masks": {"opsm": OPSM}})


def test_mu_of_rows_permuted(engine: Any) -> None:
    def permute(rows: tw.Rollout) -> None:
        lengths = [len(mu) for mu in rows.rollout_log_probs]
        first, second = next((i, j) for i in range(8) for j in range(i) if lengths[i] == lengths[j])
        mu = rows.rollout_log_probs
        mu[first], mu[second] = mu[second], mu[first]

    stops("2 of 8 sequences", engine, tamper=permute)


def test_log_probs_of_the_engine_are_of_other_rows(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.batch import micro_batch

    read = micro_batch.read

    def misread(model_output: Any, data: Any) -> Any:
        batch = read(model_output, data)
        return replace(batch, log_prob=batch.log_prob.flip(0))

    monkeypatch.setattr(micro_batch, "read", misread)
    stops("log pi of the training engine, or pi_old, belongs to other sequences", engine)


def test_mu_cast_on_the_way(engine: Any) -> None:
    def cast(rows: tw.Rollout) -> None:
        rows.rollout_log_probs = [mu.bfloat16() for mu in rows.rollout_log_probs]

    stops("not use the mu that the rollout sampled", engine, tamper=cast)


def undetached(batch: Any, step: StepStage) -> torch.Tensor:
    # Equal in value, but the ratio's own gradient comes along.
    return step.weight * step.keep * torch.exp(batch.log_prob - batch.log_prob.detach())


@pytest.mark.parametrize(
    ("hand_over", "mismatch"),
    [
        pytest.param(lambda batch, step: step.weight, MISMATCH, id="keep not applied"),
        pytest.param(lambda batch, step: step.weight, 1e-6, id="keep not applied, seen by the shift alone"),
        pytest.param(lambda batch, step: step.weight**2 * step.keep, MISMATCH, id="weight applied twice"),
        pytest.param(lambda batch, step: step.weight**2 * step.keep, 1e-6, id="weight twice, seen by the shift alone"),
        pytest.param(lambda batch, step: step.keep.float(), 1e-6, id="weight not applied, seen by the shift alone"),
        pytest.param(lambda batch, step: torch.ones_like(step.weight), 1e-6, id="neither, seen by the shift alone"),
        pytest.param(undetached, MISMATCH, id="weight not detached"),
        pytest.param(lambda batch, step: (step.weight * step.keep).roll(1, 0), MISMATCH, id="weights of other rows"),
    ],
)
def test_weights_handed_over_wrongly(engine: Any, hand_over: Any, mismatch: float) -> None:
    stops("gradient", engine, loss=adapter(hand_over), mismatch=mismatch)


def wrong_decision(change: Callable[[CorrectionSpec], CorrectionSpec]) -> Any:
    """Both stages of another correction than the one asked for: a bug in the stages, seen by no fingerprint."""
    from recipe.offpolicy.batch import micro_batch

    decide = micro_batch.decide
    return lambda spec, batch, **kwargs: decide(change(spec), batch, **kwargs)


def each_mask(**changes: Any) -> Callable[[CorrectionSpec], CorrectionSpec]:
    return lambda spec: replace(spec, masks=tuple((name, replace(mask, **changes)) for name, mask in spec.masks))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(each_mask(aggregate="product"), id="sum instead of mean"),
        pytest.param(each_mask(ratio="full"), id="full ratio instead of the others"),
        pytest.param(each_mask(ratio="rollout"), id="rollout ratio instead of the others"),
        pytest.param(each_mask(ratio="ppo"), id="ppo ratio instead of the others"),
        pytest.param(each_mask(when="any"), id="sign of the advantage not looked at"),
        pytest.param(each_mask(when="positive"), id="wrong sign of the advantage"),
        pytest.param(each_mask(lower=0.5, upper=None, delta=None), id="a wider band"),
        pytest.param(each_mask(lower=0.999, upper=1.001, delta=None), id="a narrower band"),
        pytest.param(lambda spec: replace(spec, masks=()), id="no mask"),
        pytest.param(lambda spec: replace(spec, weight=None), id="no weight"),
        pytest.param(
            lambda spec: replace(spec, weight=spec.weight and replace(spec.weight, level="sequence")),
            id="product instead of token weights",
        ),
        pytest.param(
            lambda spec: replace(spec, weight=spec.weight and replace(spec.weight, upper=1.25)), id="another cap"
        ),
    ],
)
def test_the_stages_decide_something_else(engine: Any, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    from recipe.offpolicy.batch import micro_batch

    monkeypatch.setattr(micro_batch, "decide", wrong_decision(change))
    stops("does not act|no evidence that", engine)


PENALTY: dict[str, Any] = {"masks": {"gsm": GSM}, "penalty": {"ratio": "full", "coefficient": 0.01}}
WEIGHTS: dict[str, Any] = {
    "weights": {"a": TIS_TOKEN | {"when": "negative"}, "b": TIS_TOKEN | {"when": "positive", "upper": 1.1}}
}


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(lambda squares, batch: 0.0 * squares, id="none"),
        pytest.param(lambda squares, batch: squares.detach(), id="without a gradient"),
        pytest.param(lambda squares, batch: 0.5 * squares, id="half of it"),
        pytest.param(lambda squares, batch: squares * (batch.advantages > 0), id="masked"),
    ],
)
def test_a_penalty_that_is_another(engine: Any, monkeypatch: pytest.MonkeyPatch, tamper: Any) -> None:
    from recipe.offpolicy.worker import loss, terms

    true = terms.compute_penalty
    assert first_update(engine, mapping=PENALTY)["proved"] == 1.0
    monkeypatch.setattr(loss, "compute_penalty", lambda spec, batch, whole: tamper(true(spec, batch, whole), batch))
    stops("penalty does not act|gradient", engine, mapping=PENALTY)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda spec: replace(spec, weights=()), id="no weights"),
        pytest.param(
            lambda spec: replace(spec, weights=tuple((n, replace(w, when="any")) for n, w in spec.weights[:1])),
            id="whatever the advantage",
        ),
        pytest.param(
            lambda spec: replace(spec, weights=tuple((n, replace(w, sign="token")) for n, w in spec.weights)),
            id="by the sign of each token",
        ),
    ],
)
def test_weights_of_other_advantages(engine: Any, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    from recipe.offpolicy.batch import micro_batch

    assert first_update(engine, mapping=WEIGHTS)["proved"] == 1.0
    monkeypatch.setattr(micro_batch, "decide", wrong_decision(change))
    stops("does not act|no evidence that", engine, mapping=WEIGHTS)


def corrupted_installation(kind: str) -> Any:
    """The loss with its entry changed: what the engine calls is no longer what was handed over."""
    from recipe.offpolicy.worker.loss import OffPolicyLoss
    from recipe.offpolicy.worker.metrics import METRIC_KEY

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
    ("kind", "match"),
    [
        ("loss times zero", "scaled it by zero"),
        ("verl's loss instead", "did not go through"),
        ("only while proving", "does not act"),
        ("another spec in the call", "gradient|does not act"),
    ],
)
@pytest.mark.parametrize("mismatch", [MISMATCH, 1e-3])
def test_the_installed_call_is_corrupted(engine: Any, kind: str, match: str, mismatch: float) -> None:
    stops(match, engine, loss=corrupted_installation(kind), mismatch=mismatch)


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(lambda b: replace(b, old_log_prob=b.log_prob.detach()), id="pi_old replaced by pi"),
        pytest.param(lambda b: replace(b, log_prob=b.log_prob.flip(0)), id="pi of other rows"),
        pytest.param(lambda b: replace(b, old_log_prob=b.old_log_prob.flip(0)), id="pi_old of other rows"),
        pytest.param(lambda b: replace(b, rollout_log_prob=b.rollout_log_prob.flip(0)), id="mu of other rows"),
    ],
)
def test_the_decision_reads_something_else(engine: Any, monkeypatch: pytest.MonkeyPatch, tamper: Any) -> None:
    from recipe.offpolicy.batch import micro_batch

    decide = micro_batch.decide
    monkeypatch.setattr(micro_batch, "decide", lambda spec, batch, **kwargs: decide(spec, tamper(batch), **kwargs))
    stops("does not act|no evidence that", engine, micro_batch_size=None)


def test_rejecting_everything_is_a_proof(engine: Any) -> None:
    """Nothing is left of the gradient, as it must be: the correction is live, and the keep share says the rest."""
    far = {"masks": {"gsm": GSM | {"lower": 1.0, "upper": 1.0}}}
    live = first_update(engine, mapping=far)
    assert live["proved"] == 1.0
    assert live["gradient_tokens"] > 0


def test_verl_drops_the_weights(engine: Any) -> None:
    """What verl's whitelist would do to a key it does not know."""
    from recipe.offpolicy.worker.loss import OffPolicyLoss
    from verl.workers.utils.losses import ppo_loss

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
