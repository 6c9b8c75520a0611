"""Keys that verl ignores are found on the paths that ignore them and nowhere else, and verl does ignore them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import DictConfig

from recipe.offpolicy.preflight.checks import read_spec
from recipe.offpolicy.preflight.own_keys import list_verls_names
from recipe.offpolicy.preflight.verl_keys import DEFAULTS, find_dead_keys
from recipe.offpolicy.preflight.verl_keys.misplaced import check_misplaced, find_meant
from tests.support.applications import NEEDED, application, changed
from tests.support.examples import few_when_quick
from verl_patches.execution_path import LivePath

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
VERL = "algorithm.rollout_correction"
WORKERS = f"{ACTOR}.policy_loss.rollout_correction"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"

V1 = LivePath("0.9.1", "v1", "engine", "fsdp2")
V0 = LivePath("0.8.0", "v0", "engine", "fsdp2")
V0_071 = LivePath("0.7.1", "v0", "engine", "fsdp")
LEGACY = LivePath("0.7.1", "v0", "legacy", "fsdp")
LEGACY_MEGATRON = LivePath("0.7.1", "v0", "legacy", "megatron")
MEGATRON = LivePath("0.9.1", "v1", "engine", "megatron")
MEGATRON_071 = LivePath("0.7.1", "v0", "engine", "megatron")
VEOMNI = LivePath("0.8.0", "v0", "engine", "veomni")
PATHS = (V1, V0, V0_071, LEGACY, LEGACY_MEGATRON, MEGATRON, MEGATRON_071, VEOMNI)
ENGINES = tuple(path for path in PATHS if path.worker == "engine")

BYPASS: dict[str, Any] = {f"{VERL}.bypass_mode": True}
BYPASS_IN_WORKERS: dict[str, Any] = BYPASS | {LOSS_MODE: "bypass_mode", f"{WORKERS}.loss_type": "reinforce"}
TWO_STEPS: dict[str, Any] = {f"{ACTOR}.ppo_mini_batch_size": 8, "data.train_batch_size": 16}
ONE_STEP: dict[str, Any] = {f"{ACTOR}.ppo_mini_batch_size": 16, "data.train_batch_size": 16}
OURS: dict[str, Any] = {"correction.proximal": "bypass"}
DECOUPLED: dict[str, Any] = {f"{VERL}.rollout_is": "token", f"{VERL}.rollout_is_threshold": 3.0}
REPLAYED = f"{ROLLOUT}.enable_rollout_routing_replay"


def replay(mode: str, below: str = "") -> dict[str, Any]:
    return {f"{ACTOR}.{below}router_replay.mode": mode}


@pytest.fixture(scope="module")
def base() -> Iterator[DictConfig]:
    with application(*NEEDED) as config:
        yield config


def found(base: DictConfig, changes: dict[str, Any]) -> dict[LivePath, dict[str, str]]:
    """For each path, key -> reason and fix."""
    config = changed(base, TWO_STEPS | changes)
    spec = read_spec(config)
    return {
        path: {found.key: f"{found.reason} {found.fix}" for found in find_dead_keys(config, spec, path)}
        for path in PATHS
    }


# What is set, on which paths it is dead, the key that is named, and a part of the message.
DEAD: dict[str, tuple[dict[str, Any], tuple[LivePath, ...], str, str]] = {
    "mode of another trainer": (
        {"trainer.v1.trainer_mode": "separate_async"},
        tuple(path for path in PATHS if path.trainer == "v0"),
        "trainer.v1.trainer_mode",
        "Set trainer.use_v1=true",
    ),
    "veto of 0.7.0": (
        {f"{VERL}.rollout_token_veto_threshold": 1e-4},
        PATHS,
        f"{VERL}.rollout_token_veto_threshold",
        "correction=outlier",
    ),
    "lower bound of 0.7.0": (
        DECOUPLED | {f"{VERL}.rollout_is_threshold_lower": 0.5},
        PATHS,
        f"{VERL}.rollout_is_threshold_lower",
        "'lower_upper'",
    ),
    "misspelt": (
        {f"{VERL}.rollout_si": "token"},
        PATHS,
        f"{VERL}.rollout_si",
        f"Did you mean {VERL}.rollout_is=token?",
    ),
    "unknown": ({f"{VERL}.veto": 1}, PATHS, f"{VERL}.veto", "verl reads rollout_is, "),
    "before 0.6": (
        {"algorithm.rollout_is_threshold": 2.0},
        PATHS,
        "algorithm.rollout_is_threshold",
        "algorithm.rollout_correction.rollout_is_threshold",
    ),
    "loss type without bypass": (
        {f"{VERL}.loss_type": "reinforce"},
        PATHS,
        f"{VERL}.loss_type",
        f"Set {VERL}.bypass_mode",
    ),
    "bound without weight": (
        {f"{VERL}.rollout_is_threshold": 3.0},
        PATHS,
        f"{VERL}.rollout_is_threshold",
        f"Set {VERL}.rollout_is",
    ),
    "mean of no weight": (
        {f"{VERL}.rollout_is_batch_normalize": True},
        PATHS,
        f"{VERL}.rollout_is_batch_normalize",
        "no weight to normalise",
    ),
    "bound without rejection": (
        {f"{VERL}.rollout_rs_threshold": "0.5_2.0"},
        PATHS,
        f"{VERL}.rollout_rs_threshold",
        "no rejection",
    ),
    "weight without bound": (
        {f"{VERL}.rollout_is": "token", f"{VERL}.rollout_is_threshold": None},
        PATHS,
        f"{VERL}.rollout_is_threshold",
        "leaves out the weight",
    ),
    "pair of bounds": (
        DECOUPLED | {f"{VERL}.rollout_is_threshold": "0.5_2.0"},
        tuple(path for path in PATHS if path.release == "0.7.1"),
        f"{VERL}.rollout_is_threshold",
        "takes one number",
    ),
    "no mu": (
        DECOUPLED | {f"{ROLLOUT}.calculate_log_probs": False},
        PATHS,
        f"{ROLLOUT}.calculate_log_probs",
        "skips its correction, rollout_is, rollout_is_threshold",
    ),
    "bypass with a rejection": (
        BYPASS | {f"{VERL}.rollout_rs": "seq_mean_k1", f"{VERL}.rollout_rs_threshold": "0.99_1.01"},
        PATHS,
        f"{VERL}.rollout_rs",
        "the loss stays vanilla around mu",
    ),
    "bypass as reinforce": (
        BYPASS | {f"{VERL}.loss_type": "reinforce"},
        PATHS,
        f"{VERL}.loss_type",
        "correction=verl/bypass_*",
    ),
    "bypass with another rejection in the worker": (
        BYPASS_IN_WORKERS | {f"{VERL}.loss_type": "reinforce", f"{VERL}.rollout_rs": "token_k1"},
        PATHS,
        f"{VERL}.rollout_rs",
        f"Set +{WORKERS}.rollout_rs=token_k1",
    ),
    "bypass with a worker of defaults": (
        BYPASS | {LOSS_MODE: "bypass_mode"},
        PATHS,
        f"{VERL}.rollout_is",
        f"which is sequence. Set +{WORKERS}.rollout_is=null",
    ),
    "bypass's loss alone": ({LOSS_MODE: "bypass_mode"}, PATHS, LOSS_MODE, f"Set {VERL}.bypass_mode=true"),
    "the worker's keys alone": ({f"{WORKERS}.rollout_is": "token"}, PATHS, WORKERS, "loss_mode is vanilla"),
    "mu on another worker": (
        {f"{ACTOR}.use_rollout_log_probs": True},
        tuple(path for path in PATHS if path is not LEGACY),
        f"{ACTOR}.use_rollout_log_probs",
        "correction=bypass",
    ),
    "mu lost in one step": (
        BYPASS | ONE_STEP,
        (LEGACY,),
        f"{VERL}.bypass_mode",
        f"Set +{ACTOR}.use_rollout_log_probs=true",
    ),
    "replay of the legacy actor": (
        replay("R2"),
        tuple(path for path in PATHS if path is not LEGACY_MEGATRON),
        f"{ACTOR}.router_replay.mode",
        "nothing reads it",
    ),
    "replay of the engine": (
        replay("R2", "megatron."),
        tuple(path for path in PATHS if path not in (MEGATRON, MEGATRON_071)),
        f"{ACTOR}.megatron.router_replay.mode",
        "nothing reads it",
    ),
    "replay of VeOmni": (
        replay("R2", "veomni."),
        tuple(path for path in PATHS if path is not VEOMNI),
        f"{ACTOR}.veomni.router_replay.mode",
        "nothing reads it",
    ),
    "replay of FSDP": (
        replay("R2", "fsdp_config."),
        tuple(path for path in PATHS if path is not V1),
        f"{ACTOR}.fsdp_config.router_replay.mode",
        "nothing reads it",
    ),
    "replay of the reference": (
        {"actor_rollout_ref.ref.router_replay.mode": "R3"},
        PATHS,
        "actor_rollout_ref.ref.router_replay.mode",
        "of the actor alone",
    ),
    "a file of routes": (
        replay("R2", "megatron.") | {f"{ACTOR}.megatron.router_replay.record_file": "routes.pt"},
        PATHS,
        f"{ACTOR}.megatron.router_replay.record_file",
        "routes travel with the batch",
    ),
    "R3 without the rollout's routes": (
        replay("R3", "megatron."),
        (MEGATRON, MEGATRON_071),
        f"{ACTOR}.megatron.router_replay.mode",
        f"Set {REPLAYED}=true",
    ),
    "R2 with the rollout's routes": (
        replay("R2", "megatron.") | {REPLAYED: True},
        (MEGATRON, MEGATRON_071),
        REPLAYED,
        "R2 records the trainer's own",
    ),
    "routes that nothing replays": ({REPLAYED: True}, PATHS, REPLAYED, "nothing replays the rollout's routes"),
    "R2 with verl's bypass": (
        replay("R2", "megatron.") | BYPASS,
        (MEGATRON, MEGATRON_071),
        f"{ACTOR}.megatron.router_replay.mode",
        f"{VERL}.bypass_mode=true skips it",
    ),
    "R2 with our bypass": (
        replay("R2", "megatron.") | OURS,
        (MEGATRON, MEGATRON_071),
        f"{ACTOR}.megatron.router_replay.mode",
        "correction.proximal=bypass skips it",
    ),
}


@pytest.mark.parametrize("name", few_when_quick(DEAD, lambda name: DEAD[name][2].rpartition(".")[0]))
def test_a_dead_key_is_named_where_it_is_dead(base: DictConfig, name: str) -> None:
    changes, paths, key, part = DEAD[name]
    findings = found(base, changes)
    assert [path for path in PATHS if part in findings[path].get(key, "")] == [path for path in PATHS if path in paths]


# What is read: on these paths nothing is to be said of it.
ALIVE: dict[str, tuple[dict[str, Any], tuple[LivePath, ...]]] = {
    "verl's defaults": ({}, PATHS),
    "no correction of verl's at all": ({VERL: None}, PATHS),
    "no bound of no weight": ({f"{VERL}.rollout_is_threshold": None}, PATHS),
    "decoupled weights": (DECOUPLED, PATHS),
    "decoupled rejection": ({f"{VERL}.rollout_rs": "token_k1", f"{VERL}.rollout_rs_threshold": "0.5_2.0"}, PATHS),
    "pair of bounds": (
        DECOUPLED | {f"{VERL}.rollout_is_threshold": "0.5_2.0"},
        tuple(path for path in PATHS if path.release != "0.7.1"),
    ),
    "bypass as PPO around mu": (BYPASS, PATHS),
    "bypass said to the workers too": (BYPASS_IN_WORKERS | {f"{VERL}.loss_type": "reinforce"}, PATHS),
    "bypass in one step of an engine": (BYPASS | ONE_STEP, ENGINES),
    "bypass in one step of the legacy actor": (
        BYPASS | ONE_STEP | {f"{ACTOR}.use_rollout_log_probs": True},
        (LEGACY,),
    ),
    "our bypass": (OURS | ONE_STEP, PATHS),
    "replay of the legacy actor": (replay("R2"), (LEGACY_MEGATRON,)),
    "replay of the engine": (replay("R2", "megatron."), (MEGATRON, MEGATRON_071)),
    "replay of the rollout's routes": (replay("R3", "megatron.") | {REPLAYED: True}, (MEGATRON, MEGATRON_071)),
    "replay of VeOmni": (replay("R2", "veomni."), (VEOMNI,)),
    "replay of FSDP by our trainer": (replay("R3", "fsdp_config.") | {REPLAYED: True}, (V1,)),
}


@pytest.mark.parametrize("name", few_when_quick(ALIVE, lambda name: len(ALIVE[name][1])))
def test_a_key_that_is_read_passes(base: DictConfig, name: str) -> None:
    changes, paths = ALIVE[name]
    findings = found(base, changes)
    assert {path: findings[path] for path in paths} == {path: {} for path in paths}


def test_a_correction_of_ours_leaves_verls_keys_to_the_other_check(base: DictConfig) -> None:
    """Beside ours they are refused as a whole."""
    ignored = {f"{VERL}.loss_type": "reinforce", f"{VERL}.rollout_si": "token", LOSS_MODE: "bypass_mode"}
    config = changed(base, OURS | BYPASS | ignored)
    assert list(find_dead_keys(config, read_spec(config), V1)) == []


def test_the_defaults_are_verls(base: DictConfig) -> None:
    assert dict(base.algorithm.rollout_correction) == DEFAULTS


# A key outside the section that verl reads -> the key that is meant.
MISPLACED = {
    "algorithm.rollout_corection.rollout_is": "rollout_is",
    "algorithm.rollout_corrections.rollout_is": "rollout_is",
    "algorithm.Rollout_Correction.rollout_rs": "rollout_rs",
    "algorithm.rollout_corr.rollout_iss": "rollout_is",
    "rollout_correction.rollout_is": "rollout_is",
    "rollout_correction.loss_type": "loss_type",
    "actor_rollout_ref.rollout_correction.bypass_mode": "bypass_mode",
    f"{ROLLOUT}.rollout_correction.rollout_is": "rollout_is",
    "trainer.rolout_is": "rollout_is",
    "rollout_rs_treshold": "rollout_rs_threshold",
    "algorithm.policy_loss.loss_mode": LOSS_MODE,
    "actor_rollout_ref.policy_los.loss_mode": LOSS_MODE,
    "loss_mode": LOSS_MODE,
}


@pytest.mark.parametrize("key", MISPLACED)
def test_a_correction_of_verls_in_another_place_names_the_key_that_is_read(key: str, base: DictConfig) -> None:
    config = changed(base, {key: "asked"})
    (problem,) = check_misplaced(config, read_spec(config), ())
    meant = MISPLACED[key]
    meant = f"{meant if '.' in meant else f'{VERL}.{meant}'}=asked"
    assert (problem.key, problem.verdict, problem.overrides) == (key, "ERROR", (f"~{key}", meant))
    assert problem.fix == f"Did you mean {meant}?"


def test_no_key_that_verl_ships_or_leaves_to_others_is_a_misplaced_correction(base: DictConfig) -> None:
    asked = DECOUPLED | {f"{WORKERS}.rollout_is": "token", "ray_kwargs.ray_init.rollout_is": 1, "trainer.rollout": 1}
    config = changed(base, asked | {"algorithm.rolout_correction.rollout_is": None})
    assert list(check_misplaced(config, read_spec(config), ())) == []
    found = {name for name in list_verls_names() - set(DEFAULTS) if find_meant(["x", name])}
    assert found == {"rollout_correction", "loss_mode"}
