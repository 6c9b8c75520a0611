"""What verl 0.7.1's legacy FSDP actor proves, which sabotage it detects, and which options it rejects."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec
from tests.support import legacy_actor as la
from tests.support.examples import each_nth_by_default
from tests.support.legacy_actor import (
    DYNAMIC,
    KL,
    TWO_STEPS,
    Settings,
    update,
    verdict,
)
from tests.support.presets import VALUES
from tests.support.specs import BATCH_WIDE, GSM, STACK, TIS_TOKEN

pytestmark = [pytest.mark.verl("==0.7.1"), pytest.mark.usefixtures("legacy_patches")]


# The proof --------------------------------------------------------------------------------------------------

# Those of the group itself that correct something; verl 0.7.1 notes no versions of the weights, so no age is known.
OPTIONS = {
    name: values
    for name, values in VALUES.items()
    if "/" not in name and any(values.values()) and values.get("alpha") != "by_age"
}


@pytest.mark.parametrize("name", each_nth_by_default(2, OPTIONS))
def test_each_option_is_proved_live(name: str) -> None:
    from verl.workers.config import PolicyLossConfig

    mapping = OPTIONS[name]
    config: Settings = dict(KL) if name in ("kl_clip", "kl_unbiased") else {}
    if name == "kl_unbiased":
        config |= dict(kl_loss_type="low_var_kl")
    if CorrectionSpec.from_mapping(mapping).weighs_full_ratio:
        config = dict(policy_loss=PolicyLossConfig(loss_mode="gpg"))
    live = verdict(mapping, **config)
    assert live["proved"] == 1.0
    assert live["rows"] == 8.0
    assert live["gradient_error"] < 1e-6
    assert live["shift_error"] < 1e-6


@pytest.mark.parametrize("loss_mode", ["gspo", "gpg"])
def test_live_with_other_base_losses(loss_mode: str) -> None:
    from verl.workers.config import PolicyLossConfig

    assert verdict(STACK, policy_loss=PolicyLossConfig(loss_mode=loss_mode))["proved"] == 1.0


@pytest.mark.parametrize(
    "config",
    [
        dict(ppo_epochs=2, entropy_coeff=0.1, **TWO_STEPS, **KL),
        DYNAMIC | KL,
        dict(ppo_micro_batch_size_per_gpu=3),
    ],
    ids=["epochs", "dynamic", "uneven"],
)
def test_live_however_the_batch_is_cut(config: Settings) -> None:
    live = verdict(STACK | {"kl_clip": {"lower": 0.8, "upper": 1.2}} if "use_kl_loss" in config else STACK, **config)
    assert live["rows"] == 8.0 * config.get("ppo_epochs", 1)
    assert live["gradient_error"] < 1e-6


def proofs(metrics: Settings) -> list[Any]:
    from recipe.offpolicy.worker.metrics import take_packets

    return [packet.proof for packet in take_packets(metrics)]


def test_loss_scaling_of_fp16_is_in_update_and_proof(start: la.Parameters) -> None:
    """verl's own scaler needs a GPU, so the test uses PyTorch's scaler for CPUs."""
    actor = la.actor(ppo_micro_batch_size_per_gpu=2, **KL)
    actor.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    got, metrics = la.moved(actor, la.handed(la.rollout(), STACK))
    assert la.distance(la.plain_update(la.rollout(), la.Plain(STACK, kl=0.3)), got, start) < 1e-6
    assert all(proof.gradient_error < 1e-6 for proof in proofs(metrics))


def test_bfloat16(start: la.Parameters) -> None:
    actor = la.actor(la.model(torch.float32), fsdp_config={"dtype": "bfloat16"})
    got, metrics = la.moved(actor, la.handed(la.rollout(torch.float32), STACK))
    for proof in proofs(metrics):
        assert proof.gradient_error <= proof.tolerance
        assert all(shift.error <= proof.tolerance for shift in proof.shifts.values())
    expected = la.plain_update(la.rollout(), la.Plain(STACK))
    assert la.distance(expected, {name: value.double() for name, value in got.items()}, start) < 0.1


def test_handover_and_packets_travel_as_ray_ships_them() -> None:
    """The data are pickled, dealt to two workers by ``chunk``, and collected by ``DataProto.concat``."""
    from recipe.offpolicy.worker.metrics import Packet, take_packets
    from verl import DataProto

    results = []
    for part in la.handed(la.rollout(), STACK).chunk(2):
        _, metrics = la.moved(la.actor(ppo_mini_batch_size=4), pickle.loads(pickle.dumps(part)))
        results.append(pickle.loads(pickle.dumps(DataProto(meta_info={"metrics": metrics}).to("cpu"))))
    packets = take_packets(DataProto.concat(results).meta_info["metrics"])
    assert [type(packet) for packet in packets] == [Packet, Packet]
    assert sum(len(packet.rows) for packet in packets) == 8


def test_versions_and_shadows_arrive() -> None:
    from recipe.offpolicy.batch.weight_versions import VERSIONS
    from recipe.offpolicy.correction.statistics import merge_all
    from recipe.offpolicy.worker.metrics import take_packets

    batch = la.rollout()
    batch[VERSIONS] = torch.tensor([[-2, -2]] * 4 + [[0, 0]] * 4)
    mapping = {"weight": TIS_TOKEN | {"level": "version", "upper": 1.5}}
    got, metrics = update(mapping, batch, sent={"shadows": {"gsm": {"masks": {"gsm": GSM}}}})
    by_row, _ = update({"weight": TIS_TOKEN | {"level": "sequence", "upper": 1.5}})
    assert all(torch.equal(got[name], by_row[name]) for name in got)
    merged = merge_all(packet.statistics for packet in take_packets(metrics))
    assert merged["staleness/max"].value() == 2.0
    assert 0 < merged["shadow/gsm/keep_token_share"].value() < 1


# Sabotage ---------------------------------------------------------------------------------------------------


def test_without_the_patch_the_trainer_hears_nothing() -> None:
    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.proof.verify import LivenessError, verify
    from recipe.offpolicy.worker.metrics import take_packets

    _, metrics = la.moved(la.actor(), la.handed(la.rollout(), STACK), patched=False)
    with pytest.raises(LivenessError, match="the corrected loss returned no metrics"):
        verify(take_packets(metrics), CorrectionSpec.from_mapping(STACK), sampled_rows=[])


def test_weights_that_are_ignored_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.proof.verify import LivenessError
    from recipe.offpolicy.worker.legacy_loss import LegacyLoss

    genuine = LegacyLoss.hand_over

    def forgetful(self: Any, batch: Any, step: Any) -> Any:
        handed = genuine(self, batch, step)
        handed["rollout_is_weights"] = torch.ones_like(handed["rollout_is_weights"])
        return handed

    monkeypatch.setattr(LegacyLoss, "hand_over", forgetful)
    with pytest.raises(LivenessError, match=r"is not weight \* keep"):
        verdict(STACK)


@pytest.mark.parametrize("function", ["agg_loss", "kl_penalty"])
def test_a_kl_term_of_the_actors_own_is_noticed(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.proof.verify import LivenessError
    from verl.trainer.ppo import core_algos
    from verl.workers.actor import dp_actor

    monkeypatch.setattr(dp_actor, function, getattr(core_algos, function))
    with pytest.raises(LivenessError, match=r"is not weight \* keep"):
        verdict(STACK | {"kl_clip": {"lower": 0.95, "upper": 1.1}}, ppo_micro_batch_size_per_gpu=2, **KL)


def test_another_scale_than_the_actors_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.proof.verify import LivenessError
    from verl_patches.legacy import fsdp_actor

    # Four micro-batches in a mini-batch, each a quarter.
    monkeypatch.setattr(fsdp_actor, "_scale", lambda actor, micro_batch: 1.0)
    with pytest.raises(LivenessError, match=r"loss of 4 of 4 micro-batches by 0\.25 times the expected"):
        verdict(STACK, prove=False, ppo_micro_batch_size_per_gpu=2)


def test_pi_of_the_actors_own_in_pi_olds_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor does this with one mini-batch and one epoch."""
    from recipe.offpolicy.batch import micro_batch as mb
    from recipe.offpolicy.proof.verify import LivenessError

    monkeypatch.setattr(mb, "choose_pi_old", lambda spec, batch: batch.log_prob.detach())
    with pytest.raises(LivenessError):
        verdict(STACK)


# What is refused --------------------------------------------------------------------------------------------


def test_a_batch_without_mu_names_the_key() -> None:
    batch = la.rollout()
    data = la.handed(batch, STACK)
    del data.batch["rollout_log_probs"]
    with pytest.raises(KeyError, match=r"actor_rollout_ref\.rollout\.calculate_log_probs=true"):
        la.moved(la.actor(), data)


def test_the_prefix_grouper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl does not require the grouper's package; a forward pass with the same return values replaces it."""
    forward = SimpleNamespace(forward_micro_batch_with_prefix_grouper=lambda **_: (None, torch.zeros(1)))
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.prefix_grouper_utils", forward)
    data = la.handed(la.rollout(), STACK)
    data.non_tensor_batch["uid"] = np.array(list("aabbccdd"), dtype=object)
    with pytest.raises(ValueError, match="use_prefix_grouper=true"):
        la.moved(la.actor(use_prefix_grouper=True), data)


def test_a_count_of_other_mini_batches_is_refused() -> None:
    """``denominator=kept`` counts over eight rows, but the actor steps after four."""
    data = la.handed(la.rollout(), BATCH_WIDE, mini_rows=8)
    with pytest.raises(ValueError, match="split differently"):
        la.moved(la.actor(**TWO_STEPS), data)
