"""Keys and changes of the configurations that the doctor examines, and the form of an expected verdict."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.support.corrections import GSM, opsm

VERLS = "verl.trainer.main_ppo"

ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
ACTOR = "actor_rollout_ref.actor"
VERL = "algorithm.rollout_correction"
WORKERS = f"{ACTOR}.policy_loss.rollout_correction"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
RECORDED = f"{ROLLOUT}.enable_rollout_routing_replay"
Changes = dict[str, Any]

NONE: Changes = {"correction.weight": None, "correction.masks": {}}
K3 = GSM | {"aggregate": "k3_mean", "lower": None, "upper": 0.01}
OUTLIER = GSM | {"aggregate": "any", "lower": 1e-4, "upper": 100.0}
OPSM: Changes = {"correction.masks.opsm": opsm(0.1)}
# data.train_batch_size is 1024 and ppo_mini_batch_size 256 in verl's own configuration: four gradient steps a batch.
ONE_STEP: Changes = {"data.train_batch_size": 256}
TIS_OF_VERL: Changes = {f"{VERL}.rollout_is": "token"}
K1: Changes = {f"{VERL}.rollout_rs": "token_k1"}
K1_BAND: Changes = K1 | {f"{VERL}.rollout_rs_threshold": "0.5_2.0"}
KL: Changes = {f"{ACTOR}.use_kl_loss": True}
KL_CLIP: Changes = KL | {"correction.kl_clip": {"lower": 0.8, "upper": 1.2}}
COLOCATED, THRESHOLD = "trainer.v1.colocate_async", "trainer.v1.sampler.max_off_policy_threshold"
STRATEGY = "trainer.v1.sampler.max_off_policy_strategy"
COLOCATE: Changes = {"trainer.v1.trainer_mode": "colocate_async"}
# verl's asynchronous mode with 8 batches ahead, where rows may span 5 versions.
AHEAD: Changes = {
    **COLOCATE,
    f"{COLOCATED}.num_warmup_batches": 8,
    THRESHOLD: 5,
    STRATEGY: "drop",
}


class Case(NamedTuple):
    """What is changed, what is then said of which part, and a change more, or another one, that is fine."""

    verdict: str
    row: str
    changes: Changes
    said: str
    fine: Changes
    mends: bool = True
