"""Expected verdicts of the doctor on launches of this recipe's program: one case for each rule."""

from __future__ import annotations

from tests.support.corrections import M2PO, TIS, opsm
from tests.support.doctor_keys import (
    ACTOR,
    AHEAD,
    COLOCATED,
    ENGINE,
    K3,
    KL,
    KL_CLIP,
    LOSS_MODE,
    MEGATRON,
    NONE,
    ONE_STEP,
    OPSM,
    OUTLIER,
    RECORDED,
    REPLAY,
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
    "top-p": Case("ERROR", "weight", {f"{ROLLOUT}.top_p": 0.9}, "mass that was cut", {f"{ROLLOUT}.top_p": 1.0}),
    "top-k": Case("ERROR", "weight", {f"{ROLLOUT}.top_k": 50}, "mass that was cut", {f"{ROLLOUT}.top_k": 0}),
    "min-p": Case("ERROR", "weight", {f"{ENGINE}.min_p": 0.05}, "mass that was cut", {f"{ENGINE}.min_p": 0.0}),
    "a support that nothing cuts": Case(
        "ERROR", "support", {"correction.support": "engine"}, "nothing truncates", {f"{ROLLOUT}.top_k": 0}
    ),
    "a support behind fused kernels": Case(
        "ERROR",
        "support",
        SUPPORTED | {"actor_rollout_ref.model.use_fused_kernels": True},
        "fused kernels hide the logits",
        SUPPORTED,
    ),
    "a support with KL in the reward": Case(
        "ERROR", "support", SUPPORTED | {"algorithm.use_kl_in_reward": True}, "over the support", SUPPORTED
    ),
    "a support and a penalty": Case(
        "ERROR", "weight", SUPPORTED | {f"{ROLLOUT}.repetition_penalty": 1.1}, "mass that was cut", SUPPORTED
    ),
    "validation's sampling": Case(
        "ERROR",
        "weight",
        {f"{ROLLOUT}.repetition_penalty": 1.1},
        "mass that was cut",
        {f"{ROLLOUT}.val_kwargs.top_p": 0.7, f"{ROLLOUT}.val_kwargs.temperature": 0.3},
    ),
    "raw log-probs": Case(
        "ERROR",
        "weight",
        {f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
        "leave temperature out",
        {f"{ROLLOUT}.logprobs_mode": "processed_logprobs"},
    ),
    "unlike micro-batches": Case(
        "NOTE",
        "",
        {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8},
        f"({ACTOR}.ppo_micro_batch_size_per_gpu=1)",
        {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1},
    ),
    "unlike packing": Case(
        "NOTE",
        "",
        {f"{ACTOR}.use_dynamic_bsz": True, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 1024},
        f"({ACTOR}.ppo_max_token_len_per_gpu=16384)",
        {f"{ACTOR}.use_dynamic_bsz": True},
    ),
    "packed and not": Case(
        "NOTE",
        "",
        {f"{ACTOR}.use_dynamic_bsz": True, f"{ROLLOUT}.log_prob_use_dynamic_bsz": False},
        f"({ACTOR}.use_dynamic_bsz=true)",
        {f"{ACTOR}.use_dynamic_bsz": True, f"{ROLLOUT}.log_prob_use_dynamic_bsz": True},
    ),
    "replay where no one reads it": Case(
        "ERROR",
        "router_replay",
        {f"{ACTOR}.router_replay.mode": "R2"} | MEGATRON,
        "nothing reads it",
        MEGATRON | {REPLAY: "R2"},
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
    "replay on FSDP with fused kernels": Case(
        "ERROR",
        "router_replay",
        FSDP_R2 | {"actor_rollout_ref.model.use_fused_kernels": True},
        "replace the model's forward",
        FSDP_R2,
    ),
    "replay on FSDP in one step": Case(
        "ERROR", "router_replay", FSDP_R2 | ONE_STEP, "replay would bias it for nothing", FSDP_R2
    ),
    "R2 with R3": Case(
        "ERROR",
        "router_replay",
        MEGATRON | {REPLAY: "R2", RECORDED: True},
        "R2 records the trainer's own",
        MEGATRON | {REPLAY: "R3", RECORDED: True},
    ),
    "R3 without routes": Case(
        "ERROR", "router_replay", MEGATRON | {REPLAY: "R3"}, "records none", MEGATRON | {REPLAY: "R3", RECORDED: True}
    ),
    "R2 with bypass": Case(
        "ERROR",
        "router_replay",
        MEGATRON | {REPLAY: "R2", "correction.proximal": "bypass", **NONE},
        "correction.proximal=bypass skips it",
        MEGATRON | {REPLAY: "R2"},
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
    "one mini-batch of stale rows": Case(
        "NO-OP",
        "masks.opsm.staleness",
        OPSM | ONE_STEP,
        "is always 1",
        OPSM | ONE_STEP | {"trainer.v1.trainer_mode": "colocate_async"},
    ),
    "KL left out": Case("NOTE", "", KL, "rejected tokens keep the gradient of the KL loss", KL_CLIP),
    "a clip of no KL": Case("ERROR", "kl_clip", KL_CLIP | {f"{ACTOR}.use_kl_loss": False}, "no KL loss", KL_CLIP),
    "a clip of a KL of no weight": Case(
        "ERROR", "kl_clip", KL_CLIP | {f"{ACTOR}.kl_loss_coef": 0}, "counts nothing", KL_CLIP
    ),
    "the reference of the rollout": Case(
        "NOTE",
        "kl_in_reward",
        {"algorithm.use_kl_in_reward": True, "correction.proximal": "bypass", **NONE},
        "pi_old is mu here",
        {"algorithm.use_kl_in_reward": True},
    ),
    "a dense penalty": Case(
        "NOTE",
        "",
        {"algorithm.use_kl_in_reward": True, "algorithm.adv_estimator": "grpo"},
        "sums a row to one outcome",
        {"algorithm.use_kl_in_reward": True, "algorithm.adv_estimator": "reinforce_plus_plus"},
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
    "a mode that is not covered": Case(
        "ERROR",
        "weight",
        {"trainer.v1.trainer_mode": "one_step_off"},
        "not covered",
        {"trainer.v1.trainer_mode": "separate_async"},
    ),
    "verl's wait, which looks at unfinished groups alone": Case(
        "NO-OP", STRATEGY, AHEAD | {STRATEGY: "wait"}, "finished groups are trained at age 8", AHEAD | {THRESHOLD: 9}
    ),
    "verl's drop, by design": Case(
        "NOTE", "", AHEAD, "throws away 44% of all rollouts", AHEAD | {f"{COLOCATED}.num_warmup_batches": 4}
    ),
    "no threshold of age": Case(
        "NOTE", "", AHEAD | {THRESHOLD: None}, "no age is looked at", AHEAD | {THRESHOLD: 9}, mends=False
    ),
    "an age that synchronous training does not reach": Case(
        "NO-OP",
        "masks.stale",
        {"correction.masks.stale": STALE},
        "synchronous training samples by the weights in force",
        {"correction.masks.stale": STALE, **ASYNC},
    ),
    "an age that eta does not reach": Case(
        "NO-OP",
        "masks.stale",
        {"correction.masks.stale": STALE | {"upper": 2}, "offpolicy.staleness.eta": 2, **ASYNC},
        "no token is older than 2 versions",
        {"correction.masks.stale": STALE, "offpolicy.staleness.eta": 2, **ASYNC},
    ),
    "factors that change no bound": Case(
        "NO-OP",
        "weight",
        {"correction.weight.by_staleness": [1.0, 1.0]},
        "which changes no bound",
        {"correction.weight.by_staleness": [1.0, 2.0], **ASYNC},
    ),
    "a wide cap": Case(
        "NOTE", "", {"correction.weight.upper": 25.0}, "own the gradient", {"correction.weight.upper": 5.0}
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
    "a bound beyond the clamp": Case(
        "ERROR",
        "masks.gsm",
        {"correction.masks.gsm.upper": 1e12},
        "can never act",
        {"correction.masks.gsm.upper": 10.0},
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
    "a delta beyond anything seen": Case(
        "NO-OP",
        "masks.opsm",
        {"correction.masks.opsm": opsm(10.0)},
        "Usual: 0.1",
        {"correction.masks.opsm": opsm(0.5)},
    ),
    "an outlier mask, which lies far out": Case(
        "NO-OP",
        "masks.outlier",
        {"correction.masks.outlier": OUTLIER | {"lower": 1e-6}},
        "Usual: 0.5",
        {"correction.masks.outlier": OUTLIER},
    ),
    "a band without width": Case(
        "ERROR",
        "masks.gsm",
        {"correction.masks.gsm.lower": 1.0, "correction.masks.gsm.upper": 1.0},
        "rejects everything else",
        {"correction.masks.gsm.lower": 1.0},
    ),
    "k3 without width": Case(
        "ERROR",
        "masks.gsm",
        {"correction.masks.gsm": K3 | {"upper": 0.0}},
        "rejects everything else",
        {"correction.masks.gsm": K3},
    ),
    "weights that are all 1": Case(
        "ERROR",
        "weight",
        {"correction.weight": TIS | {"kind": "clip", "lower": 1.0, "upper": 1.0}},
        "every weight is 1",
        {"correction.weight": TIS | {"kind": "clip", "lower": 0.5, "upper": 1.0}},
    ),
    "an aggregate over one token": Case(
        "ERROR",
        "weight",
        {"correction.weight.aggregate": "geometric"},
        "nothing to aggregate",
        {"correction.weight.aggregate": "geometric", "correction.weight.level": "sequence"},
    ),
    "a mask's aggregate over one token": Case(
        "ERROR",
        "masks.gsm",
        {"correction.masks.gsm.level": "token"},
        "nothing to aggregate",
        {"correction.masks.gsm.level": "token", "correction.masks.gsm.aggregate": "product"},
    ),
    "no siblings": Case(
        "ERROR",
        "baseline",
        {"correction.baseline": "exclude", "algorithm.adv_estimator": "grpo"},
        "one rollout alone",
        {"correction.baseline": "exclude", "algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2},
    ),
    "a consent to nothing": Case(
        "ERROR",
        "correction.allow_truncated_sampling",
        NONE | {"correction.allow_truncated_sampling": True},
        "there is no correction",
        {"correction.allow_truncated_sampling": True},
    ),
    "rows that micro-batches do not divide": Case(
        "ERROR",
        "weight",
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 12, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8},
        "leaves 32 on each of 8 ranks, which is no multiple of it",
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 16, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8},
    ),
    "rows that micro-batches for pi_old do not divide": Case(
        "ERROR",
        "weight",
        {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 48},
        "a batch of 1024 rows leaves 128 on each of 8 ranks, which is no multiple of it",
        {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 64},
    ),
    "rows that ranks do not divide": Case(
        "ERROR",
        "weight",
        {f"{ACTOR}.ppo_mini_batch_size": 100},
        "cannot be split evenly over 8 data-parallel ranks",
        {f"{ACTOR}.ppo_mini_batch_size": 128},
    ),
    "no count of rows": Case(
        "ERROR", "weight", {"data.train_batch_size": None}, "not a whole number", {"data.train_batch_size": 512}
    ),
    "a temperature in words": Case(
        "ERROR", "weight", {f"{ROLLOUT}.temperature": "abc"}, "not a number", {f"{ROLLOUT}.temperature": 0.7}
    ),
    "no epochs": Case("ERROR", "weight", {f"{ACTOR}.ppo_epochs": 0}, "not a whole number", {f"{ACTOR}.ppo_epochs": 2}),
    "no estimator": Case(
        "ERROR", "weight", {"algorithm.adv_estimator": None}, "not a name", {"algorithm.adv_estimator": "rloo"}
    ),
    "a base loss without weights": Case(
        "ERROR", "weight", {LOSS_MODE: "geo_mean"}, "gradient under weights", {LOSS_MODE: "gspo"}
    ),
}
