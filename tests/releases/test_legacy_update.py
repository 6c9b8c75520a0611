"""verl 0.7.1's legacy FSDP actor makes the corrected update of a plain reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import legacy_actor as la
from tests.support.legacy_actor import (
    DYNAMIC,
    EXACT,
    KL,
    MODES,
    TWO_STEPS,
    Settings,
    corrected,
    update,
    verdict,
)
from tests.support.specs import STACK

pytestmark = [pytest.mark.verl("==0.7.1"), pytest.mark.usefixtures("legacy_patches")]


# The update -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "epochs"), [(MODES[0], 1), *((mode, 2) for mode in MODES[1:])])
def test_mini_batches_and_epochs(mode: str, epochs: int, start: la.Parameters) -> None:
    norm: Settings = {"loss_scale_factor": 5} if mode == MODES[-1] else {}
    what = la.Plain(STACK, mini_rows=4, epochs=epochs, mode=mode, norm=5, entropy=0.1, kl=0.3)
    config: Settings = dict(ppo_epochs=epochs, loss_agg_mode=mode, entropy_coeff=0.1, **TWO_STEPS, **KL, **norm)
    assert la.distance(la.plain_update(la.rollout(), what), corrected(STACK, **config), start) < EXACT


def proximal(name: str, alpha: float | None = None) -> Settings:
    return {"proximal": name, "alpha": alpha}


@pytest.mark.parametrize(
    ("mapping", "pi_old"),
    [
        (proximal("bypass"), lambda rows, pi: rows["rollout_log_probs"]),
        (proximal("same_engine"), lambda rows, pi: rows["rollout_log_probs"]),
        (proximal("loglinear", 0.25), lambda rows, pi: 0.25 * pi + 0.75 * rows["rollout_log_probs"]),
        (proximal("reuse"), lambda rows, pi: pi),
    ],
    ids=["bypass", "same_engine", "loglinear", "reuse"],
)
def test_what_stands_for_pi_old(mapping: Settings, pi_old: Any, start: la.Parameters) -> None:
    expected = la.plain_update(la.rollout(), la.Plain(pi_old=pi_old))
    for used in (False, True):  # which only affects the actor's own loss
        assert la.distance(expected, corrected(mapping, use_rollout_log_probs=used), start) < EXACT


@pytest.mark.parametrize("minis", [1, 2])
def test_kl_with_a_clipped_ratio(minis: int, start: la.Parameters) -> None:
    mapping = STACK | {"kl_clip": {"lower": 0.95, "upper": 1.1}}
    what = la.Plain(STACK, mini_rows=8 // minis, kl=0.3, kl_clip=(0.95, 1.1))
    expected = la.plain_update(la.rollout(), what)
    config: Settings = dict(ppo_mini_batch_size=8 // minis, ppo_micro_batch_size_per_gpu=2, **KL)
    got, metrics = update(mapping, **config)
    assert la.distance(expected, got, start) < EXACT
    assert la.distance(expected, corrected(STACK, **config), start) > 1e-2
    if minis == 1:
        # What is reported is still the penalty.
        batch, (pi, _) = la.rollout(), la.forward(la.model(), la.rollout())
        mask = batch["response_mask"]
        penalty = float((la.kl_term(pi, batch["ref_log_prob"], pi, None) * mask).sum() / mask.sum())
        assert metrics["actor/kl_loss"] == pytest.approx(penalty, rel=1e-9)


# What is left alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TWO_STEPS, DYNAMIC], ids=["mini-batches", "dynamic"])
@pytest.mark.parametrize("handover", [False, True])
def test_without_a_correction_the_update_is_verls_to_the_bit(handover: bool, config: Settings) -> None:
    from recipe.offpolicy.worker.metrics import take_packets

    config = config | KL | {"entropy_coeff": 0.1}
    batch = la.rollout(torch.float32)
    own, own_metrics = la.moved(la.actor(la.model(torch.float32), **config), la.proto(batch), patched=False)
    sent = la.handed(batch, {}) if handover else la.proto(batch)
    got, metrics = la.moved(la.actor(la.model(torch.float32), **config), sent)
    assert all(torch.equal(own[name], got[name]) for name in own)
    packets = take_packets(metrics)
    assert len(packets) == handover * len(metrics["actor/entropy"])
    assert [len(packet.statistics) > 0 for packet in packets] == [True] * handover + [False] * (len(packets) - handover)
    assert metrics == own_metrics


# Micro-batches without a token ------------------------------------------------------------------------------


def with_silent_rows(*rows: int) -> dict[str, torch.Tensor]:
    batch = la.rollout()
    for row in rows:
        batch["response_mask"][row] = 0
    return batch


@pytest.mark.parametrize("mode", [MODES[0], *MODES[2:]])
def test_a_micro_batch_without_a_token_adds_nothing(mode: str, start: la.Parameters) -> None:
    batch = with_silent_rows(2, 3)
    norm = {"loss_scale_factor": 5} if mode == MODES[-1] else {}
    config: Settings = dict(ppo_micro_batch_size_per_gpu=2, loss_agg_mode=mode, entropy_coeff=0.1, **KL, **norm)
    expected = la.plain_update(batch, la.Plain(STACK, mode=mode, norm=5, entropy=0.1, kl=0.3))
    got, metrics = update(STACK, batch, **config)
    assert la.distance(expected, got, start) < EXACT
    assert sum(value != value for value in metrics["rollout_corr/kl"]) == 1
    assert verdict(STACK, batch, **config)["proved"] == 1.0


def test_verl_alone_stops_on_a_micro_batch_without_a_token() -> None:
    """This is the reason for the patch; if it no longer fails, a part of the patch can be deleted."""
    with pytest.raises(AssertionError, match="at least one valid token"):
        la.moved(la.actor(ppo_micro_batch_size_per_gpu=2), la.proto(with_silent_rows(2, 3)))


def test_a_mini_batch_without_a_token_moves_nothing(start: la.Parameters) -> None:
    got, metrics = update(STACK, with_silent_rows(*range(8)), entropy_coeff=0.1, **KL)
    assert all(torch.equal(got[name], start[name]) for name in start)
    assert metrics["actor/grad_norm"] == [0.0]
