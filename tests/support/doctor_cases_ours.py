"""Expected verdicts of the doctor on launches of this recipe's program: one case for each rule."""

from __future__ import annotations

from tests.support.corrections import M2PO
from tests.support.doctor_keys import (
    ACTOR,
    AHEAD,
    ENGINE,
    K3,
    KL_CLIP,
    NONE,
    ONE_STEP,
    OPSM,
    OUTLIER,
    RECORDED,
    ROLLOUT,
    STRATEGY,
    THRESHOLD,
    TIS_OF_VERL,
    Case,
)

ASYNC = {"trainer.v1.trainer_mode": "separate_async", f"{ROLLOUT}.checkpoint_engine.backend": "nccl"}
FSDP_R2 = {f"{ACTOR}.fsdp_config.router_replay.mode": "R2"}
FSDP_R3 = {f"{ACTOR}.fsdp_config.router_replay.mode": "R3"}
SUPPORTED = {f"{ROLLOUT}.top_p": 0.9, "correction.support": "engine"}
STALE = {"aggregate": "staleness", "level": "token", "upper": 1}

OF_OURS: dict[str, Case] = {
    "rollout log-probs off": Case("ERROR", "weight", {f"{ROLLOUT}.calculate_log_probs": False}, "there is no mu", {}),
    "both corrections": Case("ERROR", "weight", TIS_OF_VERL, "would correct twice", TIS_OF_VERL | NONE),
    "greedy": Case("ERROR", "masks.gsm", {f"{ROLLOUT}.temperature": 0}, "greedy", {f"{ROLLOUT}.temperature": 0.7}),
    "engine's temperature": Case(
        "ERROR",
        "weight",
        {f"{ENGINE}.override_generation_config.temperature": 0.6},
        f"divides its logits by {ROLLOUT}.temperature=1.0",
        {f"{ENGINE}.override_generation_config.temperature": 0.6, f"{ROLLOUT}.temperature": 0.6},
    ),
    "min-p": Case("ERROR", "weight", {f"{ENGINE}.min_p": 0.05}, "mass that was cut", {f"{ENGINE}.min_p": 0.0}),
    "a support that nothing cuts": Case(
        "ERROR", "support", {"correction.support": "engine"}, "nothing truncates", {f"{ROLLOUT}.top_k": 0}
    ),
    "replay on FSDP with V0": Case(
        "ERROR", "router_replay", FSDP_R2 | {"trainer.use_v1": False}, "nothing reads it", {"trainer.use_v1": False}
    ),
    "R3 on FSDP without routes": Case("ERROR", "router_replay", FSDP_R3, "records none", FSDP_R3 | {RECORDED: True}),
    "R2 on FSDP with bypass": Case(
        "ERROR",
        "router_replay",
        FSDP_R2 | {"correction.proximal": "bypass", **NONE},
        "correction.proximal=bypass skips it",
        FSDP_R2,
    ),
    "one mini-batch, a mask on staleness": Case(
        "ERROR",
        "masks.gsm",
        {"correction.masks.gsm.ratio": "ppo"} | ONE_STEP,
        "at which pi is pi_old",
        {"correction.masks.gsm.ratio": "ppo"},
    ),
    "one mini-batch, a staleness term": Case(
        "NO-OP", "masks.opsm.staleness", OPSM | ONE_STEP, "the staleness term pi / pi_old is always 1", OPSM
    ),
    "a clip of no KL": Case("ERROR", "kl_clip", KL_CLIP | {f"{ACTOR}.use_kl_loss": False}, "no KL loss", KL_CLIP),
    "the reference of the rollout": Case(
        "NOTE",
        "kl_in_reward",
        {"algorithm.use_kl_in_reward": True, "correction.proximal": "bypass", **NONE},
        "pi_old is mu here",
        {"algorithm.use_kl_in_reward": True},
    ),
    "a discount": Case(
        "NOTE",
        "dense_reward",
        {"algorithm.gamma": 0.99, "algorithm.adv_estimator": "rloo"},
        "discounts nothing",
        {"algorithm.gamma": 0.99, "algorithm.adv_estimator": "gae"},
    ),
    "process rewards of prompts that are filtered out": Case(
        "NO-OP",
        "process_reward",
        {"process_reward": {}, "algorithm.filter_groups": {"enable": True, "metric": "acc"}},
        "drops prompts without a passing rollout",
        {"process_reward": {}},
    ),
    "process rewards past their agent loops": Case(
        "ERROR",
        "process_reward",
        {"process_reward": {}, f"{ROLLOUT}.agent.agent_loop_manager_class": "mine.Manager"},
        "sequences would bypass process_reward",
        {"process_reward": {}},
    ),
    "verl's wait, which looks at unfinished groups alone": Case(
        "NO-OP", STRATEGY, AHEAD | {STRATEGY: "wait"}, "finished groups are trained at age 8", AHEAD | {THRESHOLD: 9}
    ),
    "an age that synchronous training does not reach": Case(
        "NO-OP",
        "masks.stale",
        {"correction.masks.stale": STALE},
        "synchronous training samples by the weights in force",
        {"correction.masks.stale": STALE, **ASYNC},
    ),
    "factors that change no bound": Case(
        "NO-OP",
        "weight",
        {"correction.weight.by_staleness": [1.0, 1.0]},
        "which changes no bound",
        {"correction.weight.by_staleness": [1.0, 2.0], **ASYNC},
    ),
    "an actor that verl refuses without a word": Case(
        "ERROR",
        "weight",
        {f"{ACTOR}.optim.lr_scheduler_type": "zigzag"},
        "verl does not take it: AssertionError",
        {f"{ACTOR}.optim.lr_scheduler_type": "cosine"},
    ),
    "a key deep in an actor that verl does not have": Case(
        "ERROR",
        "weight",
        {f"{ACTOR}.optim.no_such": None},
        "FSDPOptimizerConfig does not take no_such",
        {},
        mends=False,
    ),
    "two keys in the section of another": Case(
        "ERROR",
        "weight",
        {f"{ACTOR}.policy_loss.tau_pos": 1.2, f"{ACTOR}.policy_loss.tau_neg": 1.1},
        "PolicyLossConfig does not take tau_pos, tau_neg",
        {f"{ACTOR}.tau_pos": 1.2, f"{ACTOR}.tau_neg": 1.1},
    ),
    "k3 beyond the clamp": Case(
        "ERROR",
        "masks.gsm",
        {"correction.masks.gsm": K3 | {"upper": 1e9}},
        "can never act",
        {"correction.masks.gsm": K3 | {"upper": 5.0}},
    ),
    "a bound beyond anything seen": Case(
        "NO-OP", "masks.gsm", {"correction.masks.gsm.upper": 100.0}, "Usual: 1.01", {"correction.masks.gsm.upper": 1.1}
    ),
    "a budget beyond anything seen": Case(
        "NO-OP",
        "masks.m2po",
        {"correction.masks.m2po": M2PO | {"budget": 100.0}},
        "Usual: 0.04",
        {"correction.masks.m2po": M2PO | {"budget": 1.0}},
    ),
    "an outlier mask, which lies far out": Case(
        "NO-OP",
        "masks.outlier",
        {"correction.masks.outlier": OUTLIER | {"lower": 1e-6}},
        "Usual: 0.5",
        {"correction.masks.outlier": OUTLIER},
    ),
    "no siblings": Case(
        "ERROR",
        "baseline",
        {"correction.baseline": "exclude", "algorithm.adv_estimator": "grpo"},
        "one rollout alone",
        {"correction.baseline": "exclude", "algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2},
    ),
    "no epochs": Case("ERROR", "weight", {f"{ACTOR}.ppo_epochs": 0}, "not a whole number", {f"{ACTOR}.ppo_epochs": 2}),
}
