"""Keys that ``preflight.verl_keys`` calls dead are dead in every installed release of verl."""

from __future__ import annotations

import importlib.metadata
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from packaging.version import Version

from tests.support.applications import NEEDED, application, changed

ACTOR = "actor_rollout_ref.actor"
VERL = "algorithm.rollout_correction"
WORKERS = f"{ACTOR}.policy_loss.rollout_correction"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
BYPASS: dict[str, Any] = {f"{VERL}.bypass_mode": True}


@pytest.fixture(scope="module")
def base() -> Iterator[DictConfig]:
    with application(*NEEDED) as config:
        yield config


def policy_term(actor: Any, log_prob: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the loss that a worker with this configuration would compute, with verl's own registry."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        log_prob=log_prob, loss_agg_mode="token-mean", config=actor, rollout_is_weights=None, **batch
    )
    return loss


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    """Four rows of six tokens; in the last two rows, mu differs by half a nat per token."""
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
    """V0's bypass: rejection acts in the loss of the edited copy, but not in the loss that workers run."""
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


def test_verl_takes_no_log_probs_by_default_up_to_0_8() -> None:
    import verl

    rollout = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "rollout" / "rollout.yaml")
    assert rollout.calculate_log_probs is (Version(RELEASE) >= Version("0.9"))
