"""Corrections of other frameworks that have no equivalent here: the error names the framework's own key."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec, SpecError

IS: dict[str, Any] = {"use_importance_sampling_correction": True}
ROW_LIMIT = "grpo.seq_logprob_error_threshold"
TYPE, RATIO = "truncated_importance_sampling_type", "truncated_importance_sampling_ratio"
MIS = {
    "use_tis": True,
    "calculate_per_token_loss": True,
    "custom_tis_function_path": "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "areal",
        {"rejection_sampling": {}, "use_decoupled_loss": False},
        "actor.rejection_sampling={}: AReaL reads it only with",
    ),
    (
        "areal",
        {"use_decoupled_loss": True, "rejection_sampling": {"metric": "kl_k3"}},
        "actor.rejection_sampling.metric=kl_k3: AReaL computes k3 of behave / prox",
    ),
    (
        "areal",
        {"use_decoupled_loss": True, "rejection_sampling": {"metric": "kl_k2", "action": "clamp"}},
        "actor.rejection_sampling.action=clamp",
    ),
    (
        "areal",
        {"use_decoupled_loss": True, "rejection_sampling": {"level": "sequence", "agg": "sum", "action": "clamp"}},
        "actor.rejection_sampling.agg=sum",
    ),
    (
        "areal",
        {"use_decoupled_loss": True, "rejection_sampling": {"level": "sequence", "agg": "max", "lower": 0.5}},
        "actor.rejection_sampling.lower=0.5",
    ),
    (
        "areal",
        {"use_decoupled_loss": True, "rejection_sampling": {"metric": "binary_kl", "level": "sequence"}},
        "actor.rejection_sampling.level=sequence",
    ),
    (
        "areal",
        {"use_decoupled_loss": True, "rejection_sampling": {"uper": 2.0}},
        "actor.rejection_sampling.uper=2.0: unknown key",
    ),
    (
        "areal",
        {"use_decoupled_loss": True, "rejection_sampling": {"metric": "k3"}},
        "actor.rejection_sampling.metric=k3: no such choice",
    ),
    ("areal", {"use_decoupled_loss": True, "prox_logp_method": "guess"}, "actor.prox_logp_method=guess"),
    ("nemo_rl", {TYPE: "tis", RATIO: 2.0}, f"loss_fn.{TYPE}=tis: NeMo-RL reads"),
    ("nemo_rl", IS | {TYPE: "tis"}, f"loss_fn.{RATIO}=null"),
    ("nemo_rl", IS | {TYPE: "icepop", RATIO: 2.0}, f"loss_fn.{RATIO}_min=null"),
    (
        "nemo_rl",
        {"loss_fn": IS | {TYPE: "icepop", RATIO: 2.0, f"{RATIO}_min": 0.5}, ROW_LIMIT: 2.0},
        "grpo.seq_logprob_error_threshold=2.0: rows that it drops are no longer counted",
    ),
    (
        "roll",
        {
            "enable_old_logprobs_recompute": True,
            "train_infer_correction": {"is_weight": {"enabled": True, "detach": False}},
        },
        "train_infer_correction.is_weight.detach=false",
    ),
    (
        "roll",
        {"enable_old_logprobs_recompute": True, "train_infer_correction": {"weight": {}}},
        "train_infer_correction.weight={}: unknown key",
    ),
    (
        "roll",
        {
            "enable_old_logprobs_recompute": True,
            "train_infer_correction": {"filters": [{"enabled": True, "agg_type": "row"}]},
        },
        "train_infer_correction.filters[0].agg_type=row",
    ),
    (
        "slime",
        {"use_tis": True, "custom_tis_function_path": "my.own"},
        "custom_tis_function_path=my.own: it is not known what your own function does",
    ),
    ("slime", {"use_tis": True, "use_rollout_logprobs": True}, "use_tis=true"),
    ("slime", MIS | {"tis_mode": "mask", "tis_batch_normalize": True}, "tis_batch_normalize"),
    # A row of the means is divided by its kept tokens.
    (
        "slime",
        MIS | {"use_rs": True, "calculate_per_token_loss": False},
        "rs_level=token: a row's loss is divided by its kept tokens",
    ),
    (
        "miles",
        MIS | {"tis_mode": "mask", "calculate_per_token_loss": False},
        "tis_level=token: a row's loss is divided by its kept tokens",
    ),
    # One ratio per row, which no token's weight divides among its tokens.
    (
        "slime",
        {"use_tis": True, "advantage_estimator": "gspo"},
        "advantage_estimator=gspo: slime multiplies the gradient of a row's ratio by the weights of its tokens",
    ),
    (
        "trl",
        {"vllm_importance_sampling_mode": "token_mask", "importance_sampling_level": "sequence"},
        "importance_sampling_level=sequence: TRL multiplies",
    ),
    (
        "roll",
        {"importance_sampling": "seq", "train_infer_correction": {"is_weight": {"enabled": True}}},
        "importance_sampling=seq: ROLL multiplies",
    ),
    (
        "roll",
        {"importance_sampling": "seq"}
        | {"train_infer_correction": {"is_weight": {"enabled": True, "weight_type": "segment"}}},
        "importance_sampling=seq: ROLL multiplies",
    ),
    (
        "areal",
        {"use_decoupled_loss": True, "rejection_sampling": {}, "importance_sampling_level": "sequence"},
        "actor.importance_sampling_level=sequence: AReaL",
    ),
    (
        "ms_swift",
        {"rollout_importance_sampling_mode": "token_mask"},
        "beta=null: ms-swift also multiplies the KL term by weights and masks",
    ),
    (
        "ms_swift",
        {"off_policy_sequence_mask_delta": 0.1, "loss_type": "bnpo", "beta": 0.0},
        "loss_type=bnpo: it divides by the number of tokens in the rows that are kept",
    ),
    ("skyrl", {"score_centering": {"enabled": True}}, "score centering needs the engine's K"),
    ("trl", {"score_centering": True}, "score_centering=true: score centering needs"),
    ("openrlhf", {"is_correction_type": "mis"}, "algo.advantage.is_correction_type=mis"),
    (
        "openrlhf",
        {"is_correction_enable": True, "is_correction_threshold": 2.0},
        "algo.advantage.is_correction_threshold=2.0",
    ),
    (
        "open_instruct",
        {"rho_divergence_algo": "vaco"},
        "rho_divergence_algo=vaco: unknown key; the releases of open-instruct",
    ),
    ("slime", {"use_tis": True, "tis_cap": 2.0}, "tis_cap=2.0: unknown key"),
    (
        "nemo_rl",
        IS | {"truncated_importance_sampling_ratio_max": 2.0},
        "loss_fn.truncated_importance_sampling_ratio_max=2.0: unknown key",
    ),
    ("open_instruct", {"use_rho_correction": 1}, "use_rho_correction=1"),
    ("prime_rl", {"adv_tau": 0.5}, "trainer.loss.adv_tau=0.5"),
    ("prime_rl", {"type": "custom"}, "trainer.loss.type=custom"),
    ("prime_rl", {"type": "kimi_k15", "sequence_regularizer": True}, "trainer.loss.sequence_regularizer=true"),
]


@pytest.mark.parametrize(("framework", "source", "message"), REFUSED, ids=[message[:50] for *_, message in REFUSED])
def test_what_has_no_equivalent_is_named_in_the_frameworks_own_key(
    framework: str, source: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        CorrectionSpec.from_peer(framework, source)
    assert message in str(caught.value)
