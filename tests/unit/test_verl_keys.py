"""Keys that verl ignores are found on the paths that ignore them and nowhere else, and verl does ignore them."""

from __future__ import annotations

import importlib.metadata
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from applications import NEEDED, application, changed
from omegaconf import DictConfig, OmegaConf, open_dict
from packaging.version import Version

from recipe.offpolicy.checks import spec_of
from recipe.offpolicy.live_path import LivePath
from recipe.offpolicy.verl_keys import DEFAULTS, dead_keys

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
    spec = spec_of(config)
    return {
        path: {found.key: f"{found.reason} {found.fix}" for found in dead_keys(config, spec, path)} for path in PATHS
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
    "misspelt": ({f"{VERL}.rollout_si": "token"}, PATHS, f"{VERL}.rollout_si", "verl reads rollout_is, "),
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
        "correction=verl_bypass_*",
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
        PATHS,
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
    "routes for nobody": ({REPLAYED: True}, PATHS, REPLAYED, "replayed by nobody"),
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


@pytest.mark.parametrize("name", DEAD)
def test_a_dead_key_is_named_where_it_is_dead(base: DictConfig, name: str) -> None:
    changes, paths, key, part = DEAD[name]
    findings = found(base, changes)
    assert [path for path in PATHS if part in findings[path].get(key, "")] == [path for path in PATHS if path in paths]


# What is read: on these paths nothing is to be said of it.
ALIVE: dict[str, tuple[dict[str, Any], tuple[LivePath, ...]]] = {
    "verl's defaults": ({}, PATHS),
    "no correction of verl's at all": ({VERL: None}, PATHS),
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
}


@pytest.mark.parametrize("name", ALIVE)
def test_a_key_that_is_read_passes(base: DictConfig, name: str) -> None:
    changes, paths = ALIVE[name]
    findings = found(base, changes)
    assert {path: findings[path] for path in paths} == {path: {} for path in paths}


def test_a_correction_of_ours_leaves_verls_keys_to_the_other_check(base: DictConfig) -> None:
    """Beside ours they are refused as a whole."""
    ignored = {f"{VERL}.loss_type": "reinforce", f"{VERL}.rollout_si": "token", LOSS_MODE: "bypass_mode"}
    config = changed(base, OURS | BYPASS | ignored)
    assert list(dead_keys(config, spec_of(config), V1)) == []


def test_the_defaults_are_verls(base: DictConfig) -> None:
    assert dict(base.algorithm.rollout_correction) == DEFAULTS


# verl itself, whichever release is installed: what is called dead above is.


def policy_term(actor: Any, log_prob: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss that a worker with this configuration computes, by verl's own registry."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        log_prob=log_prob, loss_agg_mode="token-mean", config=actor, rollout_is_weights=None, **batch
    )
    return loss


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    """Four rows of six tokens, of which the last two rows are half a nat a token away from mu."""
    drift = torch.tensor([0.0, 0.0, 0.5, 0.5])[:, None].expand(4, 6)
    return {
        "old_log_prob": -1.0 - drift,
        "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None].expand(4, 6),
        "response_mask": torch.ones(4, 6),
    }


def worker_config(actor: DictConfig) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(actor)


def test_verl_edits_the_trainers_copy_of_a_configuration_that_workers_already_have(
    base: DictConfig, batch: dict[str, torch.Tensor]
) -> None:
    """V0's bypass: the rejection acts in the loss of the edited copy, and not in the loss that workers run."""
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode

    asked = BYPASS | {f"{VERL}.rollout_rs": "seq_mean_k1", f"{VERL}.rollout_rs_threshold": "0.9_1.1"}
    config = changed(base, asked | {f"{ACTOR}.ppo_mini_batch_size": 1, "actor_rollout_ref.actor.rollout_n": 1})
    shipped = pickle.loads(pickle.dumps(config.actor_rollout_ref.actor))  # as Ray does when workers start
    data = DataProto.from_dict({"rollout_log_probs": batch["old_log_prob"]})
    apply_bypass_mode(data, config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "bypass_mode"
    assert torch.equal(data.batch["old_log_probs"], batch["old_log_prob"])

    log_prob = torch.full((4, 6), -1.0, requires_grad=True)
    moved = {}
    for name, actor in {"worker": shipped, "trainer": config.actor_rollout_ref.actor}.items():
        (gradient,) = torch.autograd.grad(policy_term(worker_config(actor), log_prob, batch), log_prob)
        moved[name] = gradient.abs().sum(-1) > 0
    # Row 2 is beyond PPO's clip; row 3, with negative advantage, is not, and only a rejection takes it out.
    assert moved["worker"].tolist() == [True, True, False, True]
    assert moved["trainer"].tolist() == [True, True, False, False]


@pytest.mark.verl(">=0.9")
def test_the_v1_trainer_hands_bypass_to_no_worker() -> None:
    import verl

    trainers = Path(verl.__file__).parent / "trainer" / "ppo"
    assert "apply_bypass_mode(" in (trainers / "ray_trainer.py").read_text()
    for name in ("trainer_base.py", "trainer_separate_async.py"):
        source = (trainers / "v1" / name).read_text()
        assert "bypass_mode" in source
        assert "apply_bypass_mode" not in source
        assert "policy_loss" not in source


def test_verls_vanilla_loss_does_not_read_the_workers_keys(base: DictConfig, batch: dict[str, torch.Tensor]) -> None:
    log_prob = torch.full((4, 6), -1.0)
    keys = {f"{WORKERS}.rollout_rs": "seq_mean_k1", f"{WORKERS}.rollout_rs_threshold": "0.9_1.1"}
    small = {f"{ACTOR}.ppo_mini_batch_size": 1}
    losses = [
        policy_term(worker_config(changed(base, small | more).actor_rollout_ref.actor), log_prob, batch)
        for more in ({}, keys, keys | {LOSS_MODE: "bypass_mode"})
    ]
    assert losses[0] == losses[1] != losses[2]


def test_a_worker_without_the_keys_takes_verls_dataclass_and_with_one_of_them_the_yamls_null(base: DictConfig) -> None:
    bare = worker_config(changed(base, {LOSS_MODE: "bypass_mode"}).actor_rollout_ref.actor)
    assert bare.policy_loss.rollout_correction.get("rollout_is", None) == "sequence"
    one = worker_config(changed(base, {f"{WORKERS}.loss_type": "reinforce"}).actor_rollout_ref.actor)
    assert one.policy_loss.rollout_correction.get("rollout_is", None) is None
    typed = {
        f"{WORKERS}._target_": "verl.trainer.config.RolloutCorrectionConfig",
        f"{WORKERS}.loss_type": "reinforce",
    }
    full = worker_config(changed(base, typed).actor_rollout_ref.actor)
    assert full.policy_loss.rollout_correction.get("rollout_is", None) == "sequence"


def test_verl_leaves_out_a_weight_without_a_bound_and_reads_no_obsolete_name() -> None:
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    def weights(**keys: Any) -> torch.Tensor | None:
        tensors = {
            "old_log_probs": torch.tensor([[-1.0, -1.0]]),
            "rollout_log_probs": torch.tensor([[-1.0, -3.0]]),
            "response_mask": torch.ones(1, 2),
        }
        data, _ = compute_rollout_correction_and_add_to_batch(DataProto.from_dict(tensors), DictConfig(keys))
        return data.batch.get("rollout_is_weights")

    assert weights(rollout_is="token", rollout_is_threshold=None) is None
    capped = weights(rollout_is="token", rollout_is_threshold=3.0)
    assert capped is not None
    assert capped.tolist() == [[1.0, 3.0]]
    obsolete = weights(
        rollout_is="token", rollout_is_threshold=3.0, rollout_is_threshold_lower=2.0, rollout_token_veto_threshold=9.0
    )
    assert obsolete is not None
    assert torch.equal(obsolete, capped)


@pytest.mark.parametrize(
    ("strategy", "key", "replays"),
    [
        ("fsdp2", f"{ACTOR}.fsdp_config.router_replay.mode", False),
        ("fsdp2", f"{ACTOR}.megatron.router_replay.mode", False),
        ("megatron", f"{ACTOR}.router_replay.mode", False),
        ("megatron", f"{ACTOR}.megatron.router_replay.mode", True),
    ],
)
def test_verls_engine_worker_replays_by_one_key_alone(
    base: DictConfig, monkeypatch: pytest.MonkeyPatch, strategy: str, key: str, replays: bool
) -> None:
    from verl.workers.engine_workers import ActorRolloutRefWorker

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    config = changed(base, {f"{ACTOR}.strategy": strategy, f"{ACTOR}.megatron.router_replay.mode": "disabled"})
    with open_dict(config):
        config = changed(config, {key: "R2"})
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    assert worker.enable_routing_replay is replays


RELEASE = importlib.metadata.version("verl")
READERS = {
    "use_rollout_log_probs": {"0.7.1": ["dp_actor.py"]},
    "actor.router_replay": {"0.7.1": ["megatron_workers.py"]},
    "replay_file": {},
    "rollout_token_veto_threshold": {},
}
"""What verl's dataclasses or earlier releases have -> the files that read it, by release; none in others."""


@pytest.mark.parametrize("name", READERS)
def test_nothing_else_in_verl_reads_these_names(name: str) -> None:
    import verl

    root = Path(verl.__file__).parent
    sources = {path for path in root.rglob("*.py") if {"config", "experimental"}.isdisjoint(path.parts)}
    assert len(sources) > 100
    assert [path.name for path in sources if name in path.read_text()] == READERS[name].get(RELEASE, [])


def test_verl_takes_no_log_probs_by_default_up_to_0_8() -> None:
    import verl

    rollout = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "rollout" / "rollout.yaml")
    assert rollout.calculate_log_probs is (Version(RELEASE) >= Version("0.9"))
