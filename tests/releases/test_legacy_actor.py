"""verl 0.7.1's legacy FSDP actor makes the corrected update that is written plainly beside it, and proves it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import legacy_actor as la
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from specs import BATCH_WIDE, STACK, TIS_TOKEN

pytestmark = pytest.mark.verl("==0.7.1")

Settings = dict[str, Any]
EXACT = 1e-10
"""Of updates in float64, relative to the greatest move of a parameter."""
GSM = {"ratio": "rollout", "level": "sequence", "aggregate": "geometric", "lower": 0.9, "upper": 1.1, "when": "any"}
ICEPOP = GSM | {"level": "token", "aggregate": "product", "lower": 0.8, "upper": 1.25}
OPSM = {"ratio": "full", "level": "sequence", "aggregate": "geometric", "delta": 0.05, "when": "negative"}
CORRECTIONS: dict[str, Settings] = {
    "tis": {"weight": TIS_TOKEN},
    "sequence_tis": {"weight": TIS_TOKEN | {"level": "sequence", "upper": 1.5}},
    "mis": {"weight": TIS_TOKEN | {"kind": "reject", "lower": 0.8}},
    "gsm": {"masks": {"gsm": GSM}},
    "opsm": {"masks": {"opsm": OPSM}},
    "icepop": {"masks": {"icepop": ICEPOP}},
    "stack": STACK,
}
KL: Settings = dict(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="low_var_kl")
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
TWO_STEPS: Settings = dict(ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=2)


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    import verl.workers.actor.dp_actor  # noqa: F401

    import verl_patches

    assert verl_patches.install("legacy")["fsdp_actor"] == "in force"
    with la.process_group():
        yield


@pytest.fixture(scope="module")
def start() -> la.Parameters:
    return la.parameters(la.model())


def corrected(mapping: Settings, batch: Any = None, *, prove: bool = False, **config: Any) -> la.Parameters:
    """Parameters after the actor's update with the correction."""
    return update(mapping, batch, prove=prove, **config)[0]


def update(
    mapping: Settings, batch: Any = None, *, prove: bool = True, sent: Settings | None = None, **config: Any
) -> tuple[la.Parameters, Settings]:
    batch = la.rollout() if batch is None else batch
    actor = la.actor(**config)
    mode, rows = actor.config.loss_agg_mode, actor.config.ppo_mini_batch_size
    data = la.handed(batch, mapping, prove=prove, mode=mode, mini_rows=rows, **(sent or {}))
    return la.moved(actor, data)


def verdict(mapping: Settings, batch: Any = None, **config: Any) -> Settings:
    """What the trainer makes of the first update."""
    from tensordict import TensorDict

    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.liveness import verify
    from recipe.offpolicy.micro_batch import sampled_checksums
    from recipe.offpolicy.packet import take_packets

    batch = la.rollout() if batch is None else batch
    sampled = sampled_checksums(TensorDict(batch, batch_size=len(batch["responses"])))
    _, metrics = update(mapping, batch, **config)
    epochs = config.get("ppo_epochs", 1)
    return verify(take_packets(metrics), CorrectionSpec.from_mapping(mapping), sampled_rows=sampled, epochs=epochs)


# The update -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORRECTIONS)
def test_each_correction_makes_the_plain_update(name: str, start: la.Parameters) -> None:
    """One mini-batch and one epoch, where the actor itself would take pi for pi_old."""
    expected = la.plain_update(la.rollout(), la.Plain(CORRECTIONS[name]))
    assert la.distance(expected, corrected(CORRECTIONS[name]), start) < EXACT
    uncorrected = la.plain_update(la.rollout(), la.Plain())
    assert la.distance(expected, uncorrected, start) > 1e-2
    forgetful = la.plain_update(la.rollout(), la.Plain(CORRECTIONS[name], pi_old=lambda rows, pi: pi))
    assert la.distance(expected, forgetful, start) > 1e-2


@pytest.mark.parametrize("mode", MODES)
def test_each_aggregation_with_entropy_and_kl(mode: str, start: la.Parameters) -> None:
    norm: Settings = {"loss_scale_factor": 5} if mode == MODES[-1] else {}
    expected = la.plain_update(la.rollout(), la.Plain(STACK, mode=mode, norm=5, entropy=0.2, kl=0.3))
    got = corrected(STACK, entropy_coeff=0.2, loss_agg_mode=mode, ppo_micro_batch_size_per_gpu=2, **KL, **norm)
    assert la.distance(expected, got, start) < EXACT


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("mode", MODES[:3])
def test_mini_batches_and_epochs(mode: str, epochs: int, start: la.Parameters) -> None:
    what = la.Plain(STACK, mini_rows=4, epochs=epochs, mode=mode, entropy=0.1, kl=0.3)
    config: Settings = dict(ppo_epochs=epochs, loss_agg_mode=mode, entropy_coeff=0.1, **TWO_STEPS, **KL)
    assert la.distance(la.plain_update(la.rollout(), what), corrected(STACK, **config), start) < EXACT


def test_a_last_mini_batch_that_is_smaller(start: la.Parameters) -> None:
    """Eight rows in mini-batches of six."""
    expected = la.plain_update(la.rollout(), la.Plain(STACK, mini_rows=6))
    got = corrected(STACK, ppo_mini_batch_size=6, ppo_micro_batch_size_per_gpu=3)
    assert la.distance(expected, got, start) < EXACT


def test_float32(start: la.Parameters) -> None:
    """At the accuracy that the paths of all releases share."""
    rate: Settings = dict(learning_rate=la.FLOAT32_LEARNING_RATE)
    expected = la.plain_update(la.rollout(), la.Plain(STACK, mini_rows=4, entropy=0.1, kl=0.3, **rate))
    actor = la.actor(la.model(torch.float32), entropy_coeff=0.1, **rate, **TWO_STEPS, **KL)
    got, _ = la.moved(actor, la.handed(la.rollout(torch.float32), STACK, mini_rows=4))
    assert la.distance(expected, {name: value.double() for name, value in got.items()}, start) < 1e-5


SPLITS: dict[str, Settings] = {
    **{str(size): dict(ppo_micro_batch_size_per_gpu=size) for size in (1, 2, 3, 5, 8)},
    "dynamic": dict(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=17),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["stack", "batch_wide"])
def test_the_split_into_micro_batches_changes_nothing(name: str, split: str, start: la.Parameters) -> None:
    mapping = {"stack": STACK, "batch_wide": BATCH_WIDE}[name]
    config: Settings = dict(entropy_coeff=0.1, **KL)
    whole = corrected(mapping, **config | {"ppo_micro_batch_size_per_gpu": 8})
    assert la.distance(whole, corrected(mapping, **config | SPLITS[split]), start) < EXACT


def test_dynamic_batches_over_mini_batches_and_epochs(start: la.Parameters) -> None:
    expected = la.plain_update(la.rollout(), la.Plain(STACK, mini_rows=4, epochs=2, kl=0.3))
    got = corrected(STACK, ppo_epochs=2, ppo_mini_batch_size=4, **SPLITS["dynamic"], **KL)
    assert la.distance(expected, got, start) < EXACT


@pytest.mark.parametrize("split", ["1", "3", "8", "dynamic"])
def test_without_padding(split: str, start: la.Parameters) -> None:
    """Rows joined to one sequence, told apart by their positions."""
    expected = la.plain_update(la.rollout(), la.Plain(STACK, entropy=0.1, kl=0.3))
    got = corrected(STACK, use_remove_padding=True, entropy_coeff=0.1, **SPLITS[split], **KL)
    assert la.distance(expected, got, start) < EXACT


def test_denominator_kept(start: la.Parameters) -> None:
    """Two mini-batches that lose different shares of their tokens."""
    mapping = {"masks": {"gsm": GSM}, "denominator": "kept"}

    def rows(chosen: slice) -> Any:
        batch = {name: column[chosen] for name, column in la.rollout().items()}
        ones = torch.ones_like(batch["advantages"])
        keep = la.weight_and_keep({"masks": {"gsm": GSM}}, batch, ones, batch["old_log_probs"]).any(-1)
        assert 0 < keep.sum() < len(keep)
        return {name: column[keep] for name, column in batch.items()}

    # One step a half, each from the same weights, so that the two moves add up.
    halves = [la.plain_update(rows(half), la.Plain()) for half in (slice(0, 4), slice(4, 8))]
    batch = la.rollout()
    for half, expected in zip((slice(0, 4), slice(4, 8)), halves, strict=True):
        part = {name: column[half] for name, column in batch.items()}
        got = corrected(mapping, part, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=1)
        assert la.distance(expected, got, start) < EXACT


def proximal(name: str, alpha: float | None = None) -> Settings:
    return {"proximal": name, "alpha": alpha}


@pytest.mark.parametrize(
    ("mapping", "pi_old"),
    [
        (proximal("bypass"), lambda rows, pi: rows["rollout_log_probs"]),
        (proximal("loglinear", 0.25), lambda rows, pi: 0.25 * pi + 0.75 * rows["rollout_log_probs"]),
        (proximal("reuse"), lambda rows, pi: pi),
    ],
    ids=["bypass", "loglinear", "reuse"],
)
@pytest.mark.parametrize("rollout_log_probs", [False, True])
def test_what_stands_for_pi_old(mapping: Settings, pi_old: Any, rollout_log_probs: bool, start: la.Parameters) -> None:
    """Whatever ``use_rollout_log_probs`` says, which only decides what the actor's own loss would be given."""
    expected = la.plain_update(la.rollout(), la.Plain(pi_old=pi_old))
    got = corrected(mapping, use_rollout_log_probs=rollout_log_probs)
    assert la.distance(expected, got, start) < EXACT


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


def test_the_engines_loss_gives_the_same_update(start: la.Parameters) -> None:
    """The installed release's engine path: its own layout, one call for the mini-batch."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    from recipe.offpolicy.batch_plan import PLAN, SharedPlan
    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.worker_loss import OffPolicyLoss

    batch, module = la.rollout(), la.model()
    config: Settings = dict(entropy_coeff=0.1, **KL)
    data = TensorDict(batch | {"prompts": batch["input_ids"][:, : la.PROMPT]}, batch_size=len(batch["responses"]))
    numbers = dict(dp_size=1, batch_num_tokens=int(batch["response_mask"].sum()), global_batch_size=len(data))
    tu.assign_non_tensor(data, **numbers, **{PLAN: SharedPlan(1)})
    attended = batch["attention_mask"].bool()
    flat = [torch.nn.functional.pad(column, (la.PROMPT - 1, 1))[attended] for column in la.forward(module, batch)]
    loss = OffPolicyLoss(CorrectionSpec.from_mapping(STACK), la.actor_config(**config), prove=True)
    value, _ = loss({"log_probs": flat[0], "entropy": flat[1]}, data)
    value.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= la.LEARNING_RATE * parameter.grad
    assert la.distance(la.parameters(module), corrected(STACK, **config), start) < EXACT


# What is left alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TWO_STEPS, SPLITS["dynamic"]], ids=["mini-batches", "dynamic"])
@pytest.mark.parametrize("handover", [False, True])
def test_without_a_correction_the_update_is_verls_to_the_bit(handover: bool, config: Settings) -> None:
    from recipe.offpolicy.packet import take_packets

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


def test_an_update_leaves_nothing_behind_in_the_actor(start: la.Parameters) -> None:
    """The next batch without a correction must not meet the denominators of this one."""
    actor = la.actor(**TWO_STEPS)
    la.moved(actor, la.handed(la.rollout(), STACK, mini_rows=4))
    assert actor.config.global_batch_info == {}
    data = la.handed(la.rollout(), STACK, mini_rows=4)
    columns = set(data.batch.keys())
    la.moved(actor, data)
    assert set(data.batch.keys()) == columns


# Micro-batches without a token ------------------------------------------------------------------------------


def with_silent_rows(*rows: int) -> dict[str, torch.Tensor]:
    batch = la.rollout()
    for row in rows:
        batch["response_mask"][row] = 0
    return batch


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_without_a_token_adds_nothing(mode: str, start: la.Parameters) -> None:
    batch = with_silent_rows(2, 3)
    norm = {"loss_scale_factor": 5} if mode == MODES[-1] else {}
    config: Settings = dict(ppo_micro_batch_size_per_gpu=2, loss_agg_mode=mode, entropy_coeff=0.1, **KL, **norm)
    expected = la.plain_update(batch, la.Plain(STACK, mode=mode, norm=5, entropy=0.1, kl=0.3))
    got, metrics = update(STACK, batch, **config)
    assert la.distance(expected, got, start) < EXACT
    assert sum(value != value for value in metrics["rollout_corr/kl"]) == 1
    assert verdict(STACK, batch, **config)["proved"] == 1.0


def test_a_micro_batch_of_padding_alone_adds_nothing(start: la.Parameters) -> None:
    """Rows that nothing attends to, as they fill up a batch; without padding no token of them is left."""
    batch = with_silent_rows(2, 3)
    batch["attention_mask"][2:4] = 0
    filled = [0, 1, 4, 5, 6, 7]
    rows = {name: column[filled] for name, column in batch.items()}
    expected = la.plain_update(rows, la.Plain(STACK, mini_rows=6, entropy=0.1, kl=0.3))
    got = corrected(STACK, batch, use_remove_padding=True, entropy_coeff=0.1, ppo_micro_batch_size_per_gpu=2, **KL)
    assert la.distance(expected, got, start) < EXACT


def test_verl_alone_stops_on_a_micro_batch_without_a_token() -> None:
    """What the patch is for; where this no longer fails, a part of it can go."""
    with pytest.raises(AssertionError, match="at least one valid token"):
        la.moved(la.actor(ppo_micro_batch_size_per_gpu=2), la.proto(with_silent_rows(2, 3)))


def test_a_mini_batch_without_a_token_moves_nothing(start: la.Parameters) -> None:
    got, metrics = update(STACK, with_silent_rows(*range(8)), entropy_coeff=0.1, **KL)
    assert all(torch.equal(got[name], start[name]) for name in start)
    assert metrics["actor/grad_norm"] == [0.0]


# The proof --------------------------------------------------------------------------------------------------

OPTIONS = Path(__file__).parents[2] / "configs" / "correction"


def options() -> dict[str, Settings]:
    """The options of the group ``correction`` that correct something; a delta left open is 0.1."""
    found = {}
    for path in sorted(OPTIONS.glob("*.yaml")):
        values: Any = OmegaConf.to_container(OmegaConf.load(path))
        for mask in (values.get("masks") or {}).values():
            mask.update({"delta": 0.1} if mask.get("delta") == "???" else {})
        if any(values.values()):
            found[path.stem] = values
    return found


@pytest.mark.parametrize("name", options())
def test_each_option_is_proved_live(name: str) -> None:
    from verl.workers.config import PolicyLossConfig

    mapping = options()[name]
    config: Settings = dict(KL) if name == "kl_clip" else {}
    if (mapping.get("weight") or {}).get("ratio") == "full":
        config = dict(policy_loss=PolicyLossConfig(loss_mode="gpg"))
    live = verdict(mapping, **config)
    assert live["proved"] == 1.0
    assert live["rows"] == 8.0
    assert live["gradient_error"] < 1e-6
    assert live["shift_error"] < 1e-6


@pytest.mark.parametrize("loss_mode", ["gspo", "cispo", "gpg", "dppo_tv", "sapo"])
def test_live_with_other_base_losses(loss_mode: str) -> None:
    from verl.workers.config import PolicyLossConfig

    assert verdict(STACK, policy_loss=PolicyLossConfig(loss_mode=loss_mode))["proved"] == 1.0


@pytest.mark.parametrize(
    "config",
    [
        dict(ppo_epochs=2, entropy_coeff=0.1, **TWO_STEPS, **KL),
        SPLITS["dynamic"] | KL,
        dict(ppo_micro_batch_size_per_gpu=3),
    ],
    ids=["epochs", "dynamic", "uneven"],
)
def test_live_however_the_batch_is_cut(config: Settings) -> None:
    live = verdict(STACK | {"kl_clip": {"lower": 0.8, "upper": 1.2}} if "use_kl_loss" in config else STACK, **config)
    assert live["rows"] == 8.0 * config.get("ppo_epochs", 1)
    assert live["gradient_error"] < 1e-6


def test_live_with_what_is_fixed_for_the_whole_batch() -> None:
    live = verdict(BATCH_WIDE, **TWO_STEPS)
    assert live["parts"] == 3.0
    assert live["gradient_error"] < 1e-6


def proofs(metrics: Settings) -> list[Any]:
    from recipe.offpolicy.packet import take_packets

    return [packet.proof for packet in take_packets(metrics)]


def test_loss_scaling_of_fp16_is_in_update_and_proof(start: la.Parameters) -> None:
    """verl's own scaler needs a GPU; PyTorch's for the CPU stands in its place."""
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
    """Pickled, dealt to two workers by ``chunk``, and collected by ``DataProto.concat``."""
    from verl import DataProto

    from recipe.offpolicy.packet import Packet, take_packets

    results = []
    for part in la.handed(la.rollout(), STACK).chunk(2):
        _, metrics = la.moved(la.actor(ppo_mini_batch_size=4), pickle.loads(pickle.dumps(part)))
        results.append(pickle.loads(pickle.dumps(DataProto(meta_info={"metrics": metrics}).to("cpu"))))
    packets = take_packets(DataProto.concat(results).meta_info["metrics"])
    assert [type(packet) for packet in packets] == [Packet, Packet]
    assert sum(len(packet.rows) for packet in packets) == 8


def test_versions_and_shadows_arrive() -> None:
    from recipe.offpolicy.correction.statistics import merge_all
    from recipe.offpolicy.packet import take_packets
    from recipe.offpolicy.versions import VERSIONS

    batch = la.rollout()
    batch[VERSIONS] = torch.tensor([[-2, -2]] * 4 + [[0, 0]] * 4)
    mapping = {"weight": TIS_TOKEN | {"level": "version", "upper": 1.5}}
    got, metrics = update(mapping, batch, sent={"shadows": {"gsm": {"masks": {"gsm": GSM}}}})
    by_row, _ = update({"weight": TIS_TOKEN | {"level": "sequence", "upper": 1.5}})
    assert all(torch.equal(got[name], by_row[name]) for name in got)
    merged = merge_all(packet.statistics for packet in take_packets(metrics))
    assert merged["staleness/max"].value() == 2.0
    assert 0 < merged["shadow/gsm/keep_token_share"].value() < 1


def test_statistics_do_not_depend_on_the_split() -> None:
    from recipe.offpolicy.correction.statistics import merge_all
    from recipe.offpolicy.packet import take_packets

    merged = []
    for size in (8, 1):
        _, metrics = update(STACK, ppo_micro_batch_size_per_gpu=size)
        merged.append(merge_all(packet.statistics for packet in take_packets(metrics)))
    whole, single = ({name: each.value() for name, each in one.items()} for one in merged)
    assert whole == pytest.approx(single, rel=1e-9, nan_ok=True)


# Sabotage ---------------------------------------------------------------------------------------------------


def test_without_the_patch_the_trainer_hears_nothing() -> None:
    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.liveness import LivenessError, verify
    from recipe.offpolicy.packet import take_packets

    _, metrics = la.moved(la.actor(), la.handed(la.rollout(), STACK), patched=False)
    with pytest.raises(LivenessError, match="without a word from the correction"):
        verify(take_packets(metrics), CorrectionSpec.from_mapping(STACK), sampled_rows=[])


def test_a_name_that_verls_module_binds_anew_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo import core_algos
    from verl.workers.actor import dp_actor

    from recipe.offpolicy.liveness import LivenessError

    monkeypatch.setattr(dp_actor, "get_policy_loss_fn", core_algos.get_policy_loss_fn)
    with pytest.raises(LivenessError, match="without a word from the correction"):
        verdict(STACK)


def test_weights_that_are_ignored_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.legacy_loss import LegacyLoss
    from recipe.offpolicy.liveness import LivenessError

    genuine = LegacyLoss.hand_over

    def forgetful(self: Any, batch: Any, step: Any, data: Any) -> Any:
        handed = genuine(self, batch, step, data)
        handed["rollout_is_weights"] = torch.ones_like(handed["rollout_is_weights"])
        return handed

    monkeypatch.setattr(LegacyLoss, "hand_over", forgetful)
    with pytest.raises(LivenessError, match="is not weight x keep x verl's own"):
        verdict(STACK)


@pytest.mark.parametrize("function", ["agg_loss", "kl_penalty"])
def test_a_kl_term_of_the_actors_own_is_noticed(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo import core_algos
    from verl.workers.actor import dp_actor

    from recipe.offpolicy.liveness import LivenessError

    monkeypatch.setattr(dp_actor, function, getattr(core_algos, function))
    with pytest.raises(LivenessError, match="is not weight x keep x verl's own"):
        verdict(STACK | {"kl_clip": {"lower": 0.95, "upper": 1.1}}, ppo_micro_batch_size_per_gpu=2, **KL)


def test_another_scale_than_the_actors_stops_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_patches.legacy import fsdp_actor

    monkeypatch.setattr(fsdp_actor, "_scale", lambda actor, micro_batch: 1.0)
    with pytest.raises(RuntimeError, match="scales the loss of a micro-batch otherwise"):
        update(STACK, ppo_micro_batch_size_per_gpu=2)


def test_pi_of_the_actors_own_in_pi_olds_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the actor does with one mini-batch and one epoch."""
    from recipe.offpolicy import micro_batch as mb
    from recipe.offpolicy.liveness import LivenessError

    monkeypatch.setattr(mb, "proximal", lambda spec, batch: batch.log_prob.detach())
    with pytest.raises(LivenessError):
        verdict(STACK)


# What is refused --------------------------------------------------------------------------------------------


def test_a_batch_without_mu_names_the_key() -> None:
    batch = la.rollout()
    data = la.handed(batch, STACK)
    del data.batch["rollout_log_probs"]
    with pytest.raises(KeyError, match=r"actor_rollout_ref\.rollout\.calculate_log_probs=true"):
        la.moved(la.actor(), data)


def test_verls_own_weights_beside_ours_are_refused() -> None:
    batch = la.rollout()
    batch["rollout_is_weights"] = torch.ones_like(batch["old_log_probs"])
    with pytest.raises(ValueError, match=r"algorithm\.rollout_correction\.rollout_is=null"):
        update(STACK, batch)


def test_the_prefix_grouper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package is not among verl's requirements; a forward pass that returns what verl's does stands for it."""
    forward = SimpleNamespace(forward_micro_batch_with_prefix_grouper=lambda **_: (None, torch.zeros(1)))
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.prefix_grouper_utils", forward)
    data = la.handed(la.rollout(), STACK)
    data.non_tensor_batch["uid"] = np.array(list("aabbccdd"), dtype=object)
    with pytest.raises(ValueError, match="use_prefix_grouper=true"):
        la.moved(la.actor(use_prefix_grouper=True), data)


def test_a_count_of_other_mini_batches_is_refused() -> None:
    """``denominator=kept`` counted over eight rows, and an actor that steps after four."""
    data = la.handed(la.rollout(), BATCH_WIDE, mini_rows=8)
    with pytest.raises(ValueError, match="dealt otherwise"):
        la.moved(la.actor(**TWO_STEPS), data)
