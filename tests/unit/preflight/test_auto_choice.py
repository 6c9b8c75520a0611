"""``correction=auto``: every branch of the decision tree, what it reads, and what it rejects."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.correction.problem import CheckError
from recipe.offpolicy.preflight.auto_choice import (
    Selection,
    Setup,
    check_requirements,
    read_setup,
    refuse_setup,
    select,
)
from recipe.offpolicy.preflight.composed import Composed
from tests.support.short_keys import read_changes, read_table

PLAIN = Setup("different", "sync", "dense", "single", 1, "megatron")
REPLAY = "actor_rollout_ref.actor.megatron.router_replay.mode"
FSDP_REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
RECORD = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
STALENESS = "trainer.v1.sampler.max_off_policy_threshold"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


def required(selection: Selection) -> dict[str, Any]:
    return {one.key: one.value for one in selection.requires}


# The tree -----------------------------------------------------------------------------------------------------


def test_a_limit_of_staleness_takes_the_place_of_verls_threshold() -> None:
    selection = select(replace(PLAIN, mode="async", bounded=True))
    assert required(selection) == {"offpolicy.staleness.eta": 8}
    (advice,) = selection.advice
    assert advice == "set offpolicy.staleness.eta to at most 4 for code, 8 for maths."
    check_requirements(Composed(OmegaConf.create({"offpolicy": {"staleness": {"eta": 8}}})), selection.requires)
    with pytest.raises(CheckError, match=r"offpolicy\.staleness\.eta=9: .* Set offpolicy\.staleness\.eta=8"):
        check_requirements(Composed(OmegaConf.create({"offpolicy": {"staleness": {"eta": 9}}})), selection.requires)
    moved = select(replace(PLAIN, mode="async", bounded=True, adaptive=True))
    assert moved.options == ("decoupled_ppo", "opsm")  # the effective sample size is that of a weight
    assert required(moved) == {"offpolicy.staleness.eta": 8, "offpolicy.staleness.adapt.ceiling": 8}


@pytest.mark.parametrize(
    ("engine", "mode", "options"),
    [
        ("same", "sync", ("none",)),
        ("same", "async", ("opsm",)),
        ("different", "sync", ("tis_token",)),
        ("different", "async", ("opsm",)),
    ],
)
def test_engine_and_mode_decide(engine: Any, mode: Any, options: tuple[str, ...]) -> None:
    others = itertools.product(("dense", "moe"), ("single", "tools"), (1, 2, 8), ("fsdp", "megatron"))
    for setup in (Setup(engine, mode, *each) for each in others):
        selection = select(setup)
        assert selection.options == options, setup
        for name in ("engine", "mode", "model", "trajectory", "minibatches"):
            assert any(f"setup.{name}={getattr(setup, name)}" in line for line in selection.reasons), setup
        assert (STALENESS in required(selection)) == (mode == "async"), setup


@pytest.mark.parametrize(
    ("n", "mode", "more"),
    [
        (1, "disabled", {}),
        (2, "R2", {"correction.proximal": "recompute"}),
        (3, "R3", {RECORD: True}),
        (8, "R3", {RECORD: True}),
    ],
)
@pytest.mark.parametrize(("strategy", "key"), [("megatron", REPLAY), ("fsdp", FSDP_REPLAY), ("fsdp2", FSDP_REPLAY)])
def test_minibatches_decide_the_replay(n: int, mode: str, more: dict[str, Any], strategy: str, key: str) -> None:
    """R2 fails with 8 mini-batches, and one step per batch needs no replay."""
    setup = replace(PLAIN, model="moe", minibatches=n, strategy=strategy, fsdp_replay=strategy != "megatron")
    requires = {key: mode, **more}
    assert required(select(setup)) == requires
    assert required(select(replace(setup, mode="async"))) == requires | {STALENESS: 9}
    assert required(select(replace(setup, model="dense"))) == {}
    assert select(replace(setup, objective="gspo")).requires == [] or n == 1


@pytest.mark.parametrize("strategy", ["fsdp2", "veomni"])
def test_without_replay_in_verl(strategy: str) -> None:
    selection = select(replace(PLAIN, model="moe", minibatches=4, strategy=strategy))
    assert selection.requires == []
    said = f"routing replay is unavailable with actor_rollout_ref.actor.strategy={strategy}"
    assert any(said in reason for reason in selection.reasons)
    assert any("gsm" in line and f"{LOSS}=gspo" in line for line in selection.advice)
    # Nothing is missing where nothing would be replayed.
    assert not any("is unavailable" in r for r in select(replace(PLAIN, model="moe", strategy=strategy)).reasons)


# What is read ---------------------------------------------------------------------------------------------------


def configuration(**changes: Any) -> DictConfig:
    """The keys of verl that are read, as a synchronous run with FSDP has them."""
    config = OmegaConf.create(
        {
            "setup": {"engine": None, "mode": None, "model": "dense", "trajectory": None, "minibatches": None},
            "data": {"train_batch_size": 64},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync", "sampler": {"max_off_policy_threshold": 8}}},
            "correction": {"proximal": "recompute"},
            "actor_rollout_ref": {
                "actor": {
                    "strategy": "fsdp",
                    "ppo_mini_batch_size": 64,
                    "ppo_epochs": 1,
                    "policy_loss": {"loss_mode": "vanilla"},
                },
                "rollout": {
                    "name": "vllm",
                    "enable_rollout_routing_replay": False,
                    "multi_turn": {"enable": False},
                    "agent": {"default_agent_loop": "single_turn_agent"},
                },
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


ACTOR, ROLLOUT = "actor_rollout_ref__actor", "actor_rollout_ref__rollout"
SYNC = Setup("different", "sync", "dense", "single", 1, "fsdp")


TABLE = dict(read_table("auto_set_ups.txt"))


def changed(words: str) -> Composed:
    return Composed(configuration(**read_changes(words)))


@pytest.mark.parametrize("case", TABLE["set-up"], ids=str)
def test_the_set_up_of_a_run(case: list[str]) -> None:
    words, *read = case
    expected: dict[str, Any] = {
        key: int(value) if value.isdigit() else value for key, _, value in (one.partition("=") for one in read)
    }
    assert replace(read_setup(changed(words)), fsdp_replay=False) == replace(SYNC, **expected)


@pytest.mark.parametrize("case", TABLE["refused"], ids=str)
def test_what_is_contradicted_or_neither_given_nor_known(case: list[str]) -> None:
    words, *parts = case
    with pytest.raises(SpecError) as caught:
        read_setup(changed(words))
    said, key = str(caught.value), parts[0].partition("=")[0]
    assert said.startswith(parts[0])
    assert [part for part in parts if part not in said] == []
    assert f"Set {key}=" in said
    assert parts[0].endswith("null") or f"Set {key}=null" in said


@pytest.mark.parametrize(("words", "part"), TABLE["malformed"])
def test_malformed_values(words: str, part: str) -> None:
    for read in (read_setup, refuse_setup):
        with pytest.raises(CheckError) as caught:
            read(changed(words))
        assert part in str(caught.value)


def test_what_nothing_would_read() -> None:
    refuse_setup(Composed(configuration(setup__model=None)))
    with pytest.raises(SpecError, match=r"setup\.model=dense: only correction=auto reads it\. Set correction=auto, or"):
        refuse_setup(Composed(configuration()))


# What is required -----------------------------------------------------------------------------------------------


def held(changes: dict[str, Any]) -> None:
    config = configuration(**changes)
    check_requirements(Composed(config), select(read_setup(Composed(config))).requires)


MOE: dict[str, Any] = {"setup__model": "moe", f"{ACTOR}__strategy": "megatron"}
MODE = f"{ACTOR}__megatron__router_replay__mode"


def moe(n: int, **changes: Any) -> dict[str, Any]:
    return MOE | {f"{ACTOR}__ppo_mini_batch_size": 64 // n, MODE: "disabled"} | changes


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (moe(2), [f"{REPLAY}=disabled: R2", f"Set {REPLAY}=R2, or {LOSS}=gspo"]),
        (moe(8, **{MODE: "R2"}), [f"{REPLAY}=R2: R3", f"Set {REPLAY}=R3"]),
        (moe(4, **{MODE: "R3"}), [f"{RECORD}=false: ", f"Set {RECORD}=true"]),
        (moe(1, **{MODE: "R2"}), [f"{REPLAY}=R2: no routing replay", f"Set {REPLAY}=disabled, or choose"]),
        (
            moe(2, **{MODE: "R2", "correction__proximal": "bypass"}),
            ["correction.proximal=bypass: R2 records routes", "Set correction.proximal=recompute"],
        ),
        (
            {"trainer__v1__trainer_mode": "separate_async", STALENESS.replace(".", "__"): None},
            [f"{STALENESS}=null: ", f"Set {STALENESS}=9"],
        ),
        (
            {"trainer__v1__trainer_mode": "separate_async", STALENESS.replace(".", "__"): 10},
            [f"{STALENESS}=10: ", f"Set {STALENESS}=9"],
        ),
    ],
)
def test_configurations_that_do_not(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(CheckError) as caught:
        held(changes)
    for part in parts:
        assert part in str(caught.value)
    assert "choose corrections by name instead of correction=auto" in str(caught.value)
