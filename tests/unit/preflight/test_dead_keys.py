"""Keys of verl's own correction that a path does not read, check by check; and their readers."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.problem import Problem
from recipe.offpolicy.preflight.verl_keys import keys
from recipe.offpolicy.preflight.verl_keys.bypass import check_bypass, check_bypass_loss, check_legacy_mu
from recipe.offpolicy.preflight.verl_keys.decoupled import check_decoupled
from recipe.offpolicy.preflight.verl_keys.former_names import check_former_names, check_trainer_mode
from recipe.offpolicy.preflight.verl_keys.router_replay import check_router_replay, find_router_replay
from tests.support.corrections import TIS, spec
from verl_patches.execution_path import LivePath

NONE, OURS = CorrectionSpec(), spec(TIS)


def config(
    own: dict[str, Any] | None, loss_mode: str = "vanilla", of_worker: dict[str, Any] | None = None
) -> DictConfig:
    policy_loss: dict[str, Any] = {"loss_mode": loss_mode}
    if of_worker is not None:
        policy_loss["rollout_correction"] = of_worker
    actor = {"policy_loss": policy_loss}
    return OmegaConf.create({"algorithm": {"rollout_correction": own}, "actor_rollout_ref": {"actor": actor}})


def found(problems: Any) -> list[tuple[str, Any]]:
    made: list[Problem] = list(problems)
    return [(problem.key, problem.value) for problem in made]


def test_readers_of_verls_own_section() -> None:
    assert keys.read_rollout_correction(config(None)) == {}
    assert keys.list_active(config(None)) == ()
    on = config({"rollout_rs": "seq_mean_k1", "rollout_is": None, "bypass_mode": False})
    assert keys.list_active(on) == ("rollout_rs",)
    assert keys.find_changed_keys(on) == {"rollout_rs": "seq_mean_k1"}
    assert keys.name_part("rollout_rs") == "rollout_correction.rollout_rs"
    assert keys.get_value(on, "algorithm.rollout_correction.rollout_rs") == "seq_mean_k1"
    assert keys.get_value(on, "algorithm.no.such") is None


def test_the_workers_copy_has_defaults_of_its_own() -> None:
    # verl's dataclass weighs by sequence where its YAML does not weigh.
    assert keys.read_workers_copy(config(None))["rollout_is"] == "sequence"
    assert keys.read_workers_copy(config(None, of_worker={"rollout_is": "token"}))["rollout_is"] == "token"
    assert keys.read_workers_copy(config(None, of_worker={}))["rollout_is"] == keys.DEFAULTS["rollout_is"]


def test_plain_values_of_a_node() -> None:
    assert keys.to_plain(OmegaConf.create({"a": 1, "b": {"c": "${a}"}}).b) == {"c": 1}
    assert keys.to_plain(OmegaConf.create([1])) == {}
    assert keys.to_plain(None) == {}


def test_the_loss_of_bypass_mode_needs_bypass_mode() -> None:
    loss_mode = "actor_rollout_ref.actor.policy_loss.loss_mode"
    assert found(check_bypass_loss(config({}, "bypass_mode"), NONE)) == [(loss_mode, "bypass_mode")]
    assert found(check_bypass_loss(config({"bypass_mode": True}, "bypass_mode"), NONE)) == []
    unread = config({}, of_worker={"rollout_is": "token"})
    assert found(check_bypass_loss(unread, NONE)) == [
        ("actor_rollout_ref.actor.policy_loss.rollout_correction", {"rollout_is": "token"})
    ]


def test_former_names_are_reported_where_verls_own_correction_is_asked_for() -> None:
    former = config({"rollout_is_level": "token"})
    assert found(check_former_names(former, NONE)) == [("algorithm.rollout_correction.rollout_is_level", "token")]
    assert found(check_former_names(former, OURS)) == []


V1, V0 = LivePath("0.9.1", "v1", "engine", "fsdp2"), LivePath("0.9.1", "v0", "engine", "fsdp2")
LEGACY = LivePath("0.7.1", "v0", "legacy", "fsdp")
OWN = "algorithm.rollout_correction"


def with_mu(own: dict[str, Any] | None, calculated: bool = True) -> DictConfig:
    made = config(own)
    OmegaConf.update(made, "actor_rollout_ref.rollout.calculate_log_probs", calculated, force_add=True)
    return made


def test_keys_that_lack_another_and_mu_that_is_not_computed() -> None:
    unread = with_mu({"rollout_rs_threshold": "0.5_2.0"})
    assert found(check_decoupled(unread, NONE, V1)) == [(f"{OWN}.rollout_rs_threshold", "0.5_2.0")]
    assert found(check_decoupled(with_mu({"rollout_is": "token"}), NONE, V1)) == []
    skipped = with_mu({"rollout_is": "token"}, calculated=False)
    assert found(check_decoupled(skipped, NONE, V1)) == [("actor_rollout_ref.rollout.calculate_log_probs", False)]
    pair = with_mu({"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"})
    assert found(check_decoupled(pair, NONE, LEGACY)) == [(f"{OWN}.rollout_is_threshold", "0.5_2.0")]
    assert found(check_decoupled(pair, NONE, V1)) == []


def test_bypass_mode_leaves_the_rest_to_a_loss_that_is_not_there() -> None:
    asked = config({"bypass_mode": True, "rollout_is": "token"})
    assert found(check_bypass(asked, NONE, V0)) == [(f"{OWN}.rollout_is", "token")]
    assert found(check_bypass(asked, OURS, V0)) == []
    there = config({"bypass_mode": True}, "bypass_mode", of_worker={"rollout_is": "token"})
    assert (f"{OWN}.rollout_is", keys.DEFAULTS["rollout_is"]) in found(check_bypass(there, NONE, V1))


def test_the_v1_trainer_alone_reads_a_mode() -> None:
    mode = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "colocate_async"}}})
    assert found(check_trainer_mode(mode, V0)) == [("trainer.v1.trainer_mode", "colocate_async")]
    assert found(check_trainer_mode(mode, V1)) == []


def test_the_legacy_actor_alone_reads_where_mu_stands() -> None:
    def made(own: dict[str, Any] | None, **actor: Any) -> DictConfig:
        steps = {"ppo_mini_batch_size": 256, "ppo_epochs": 1}
        values = {"data": {"train_batch_size": 256}, "algorithm": {"rollout_correction": own}}
        return OmegaConf.create({**values, "actor_rollout_ref": {"actor": steps | actor}})

    key = "actor_rollout_ref.actor.use_rollout_log_probs"
    assert found(check_legacy_mu(made(None, use_rollout_log_probs=True), V1)) == [(key, True)]
    assert found(check_legacy_mu(made(None, use_rollout_log_probs=True), LEGACY)) == []
    assert found(check_legacy_mu(made({"bypass_mode": True}), LEGACY)) == [(f"{OWN}.bypass_mode", True)]
    assert found(check_legacy_mu(made({"bypass_mode": True}, ppo_epochs=2), LEGACY)) == []


def test_routes_that_are_replayed_are_recorded_and_the_reverse() -> None:
    megatron = LivePath("0.9.1", "v1", "engine", "megatron")
    recorded = "actor_rollout_ref.rollout.enable_rollout_routing_replay"

    def made(mode: str, record: bool) -> DictConfig:
        actor = {"megatron": {"router_replay": {"mode": mode}}}
        rollout = {"enable_rollout_routing_replay": record}
        return OmegaConf.create({"actor_rollout_ref": {"actor": actor, "rollout": rollout}, "algorithm": {}})

    live = "actor_rollout_ref.actor.megatron.router_replay.mode"
    assert find_router_replay(made("disabled", False)) is None
    assert find_router_replay(made("R3", True)) == f"{live}=R3"
    assert find_router_replay(made("disabled", True)) == f"{recorded}=true"
    assert found(check_router_replay(made("R3", True), NONE, megatron)) == []
    assert found(check_router_replay(made("R3", False), NONE, megatron)) == [(live, "R3")]
    assert found(check_router_replay(made("disabled", True), NONE, megatron)) == [(recorded, True)]
    for skips in ("bypass", "same_engine"):
        assert found(check_router_replay(made("R2", False), CorrectionSpec(proximal=skips), megatron)) == [(live, "R2")]
    # verl's FSDP replays nothing; with our trainer it does, by a key of its own.
    assert found(check_router_replay(made("R3", False), NONE, V1)) == [(live, "R3")]
    fsdp = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
    actor = {"fsdp_config": {"router_replay": {"mode": "R3"}}}
    config = OmegaConf.create({"actor_rollout_ref": {"actor": actor, "rollout": {}}})
    assert found(check_router_replay(config, NONE, V1)) == [(fsdp, "R3")]
    with_ours = OmegaConf.merge(config, {"offpolicy": {}})
    assert "nothing reads it" in next(check_router_replay(config, NONE, V1)).reason
    assert "the rollout records none" in next(check_router_replay(with_ours, NONE, V1)).reason
    assert "nothing reads it" in next(check_router_replay(with_ours, NONE, V0)).reason
