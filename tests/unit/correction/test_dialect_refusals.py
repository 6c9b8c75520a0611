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
SK, TR, VE = "off_policy_correction.", "vllm_importance_sampling_", "algorithm.rollout_correction."
DETACHED = "train_infer_correction.is_weight.detach=false"
TOKEN: dict[str, Any] = {"rollout_is": "token"}


def areal(**rejection: Any) -> dict[str, Any]:
    return {"use_decoupled_loss": True, "rejection_sampling": rejection}


def roll(**section: Any) -> dict[str, Any]:
    return {"enable_old_logprobs_recompute": True, "train_infer_correction": section}


def cap(threshold: Any) -> dict[str, Any]:
    return TOKEN | {"rollout_is_threshold": threshold}


def reject(options: Any, threshold: Any) -> dict[str, Any]:
    return {"rollout_rs": options, "rollout_rs_threshold": threshold}


REFUSED: dict[str, list[tuple[Any, str]]] = {
    "areal": [
        (
            {"rejection_sampling": {}, "use_decoupled_loss": False},
            "actor.rejection_sampling={}: AReaL reads this key only",
        ),
        (areal(metric="kl_k3"), "actor.rejection_sampling.metric=kl_k3: AReaL computes k3 of behave / prox"),
        (areal(metric="kl_k2", action="clamp"), "actor.rejection_sampling.action=clamp"),
        (areal(level="sequence", agg="sum", action="clamp"), "actor.rejection_sampling.agg=sum"),
        (areal(level="sequence", agg="max", lower=0.5), "actor.rejection_sampling.lower=0.5"),
        (areal(metric="binary_kl", level="sequence"), "actor.rejection_sampling.level=sequence"),
        (areal(uper=2.0), "actor.rejection_sampling.uper=2.0: unknown key"),
        ({"use_decoupled_loss": True, "prox_logp_method": "guess"}, "actor.prox_logp_method=guess"),
        (areal() | {"importance_sampling_level": "sequence"}, "actor.importance_sampling_level=sequence: AReaL"),
    ],
    "nemo_rl": [
        ({TYPE: "tis", RATIO: 2.0}, f"loss_fn.{TYPE}=tis: NeMo-RL reads"),
        (IS | {TYPE: "tis"}, f"loss_fn.{RATIO}=null"),
        (IS | {TYPE: "icepop", RATIO: 2.0}, f"loss_fn.{RATIO}_min=null"),
        (
            {"loss_fn": IS | {TYPE: "icepop", RATIO: 2.0, f"{RATIO}_min": 0.5}, ROW_LIMIT: 2.0},
            "grpo.seq_logprob_error_threshold=2.0: NeMo-RL's denominator excludes the rows",
        ),
        (IS | {f"{RATIO}_max": 2.0}, f"loss_fn.{RATIO}_max=2.0: unknown key"),
    ],
    "roll": [
        (roll(is_weight={"enabled": True, "detach": False}), DETACHED),
        (roll(weight={}), "train_infer_correction.weight={}: unknown key"),
        (roll(filters=[{"enabled": True, "agg_type": "row"}]), "train_infer_correction.filters[0].agg_type=row"),
        (
            roll(is_weight={"enabled": True}) | {"importance_sampling": "seq"},
            "importance_sampling=seq: ROLL multiplies",
        ),
    ],
    "slime": [
        (
            {"use_tis": True, "custom_tis_function_path": "my.own"},
            "my.own: the effect of a custom function is unknown",
        ),
        ({"use_tis": True, "use_rollout_logprobs": True}, "use_tis=true"),
        (MIS | {"tis_mode": "mask", "tis_batch_normalize": True}, "tis_batch_normalize"),
        # A row of the means is divided by its kept tokens.
        (
            MIS | {"use_rs": True, "calculate_per_token_loss": False},
            "rs_level=token: this framework divides a row's loss",
        ),
        # One ratio per row, which no token's weight divides among its tokens.
        ({"use_tis": True, "advantage_estimator": "gspo"}, "advantage_estimator=gspo: slime multiplies the gradient"),
        ({"use_tis": True, "tis_cap": 2.0}, "tis_cap=2.0: unknown key"),
    ],
    "miles": [
        (
            MIS | {"tis_mode": "mask", "calculate_per_token_loss": False},
            "tis_level=token: this framework divides a row's loss",
        )
    ],
    "ms_swift": [
        ({"rollout_importance_sampling_mode": "token_mask"}, "beta=null: ms-swift also multiplies the KL term"),
        (
            {"off_policy_sequence_mask_delta": 0.1, "loss_type": "bnpo", "beta": 0.0},
            "loss_type=bnpo: this loss divides by",
        ),
    ],
    "openrlhf": [
        ({"is_correction_type": "mis"}, "algo.advantage.is_correction_type=mis"),
        ({"is_correction_enable": True, "is_correction_threshold": 2.0}, "algo.advantage.is_correction_threshold=2.0"),
        ({"is_correction_enable": True, "is_correction_threshold": [0.5, "5"]}, "threshold=[0.5,'5']"),
    ],
    "open_instruct": [
        ({"rho_divergence_algo": "vaco"}, "rho_divergence_algo=vaco: unknown key; the known releases of open-instruct"),
        ({"use_rho_correction": 1}, "use_rho_correction=1"),
    ],
    "prime_rl": [
        ({"adv_tau": 0.5}, "trainer.loss.adv_tau=0.5"),
        ({"type": "custom"}, "trainer.loss.type=custom"),
        ({"type": "kimi_k15", "sequence_regularizer": True}, "trainer.loss.sequence_regularizer=true"),
    ],
    "skyrl": [
        ({"score_centering": {"enabled": True}}, "score centering needs the engine's K"),
        ({"tis_ratio": "token"}, SK + "tis_ratio=token: unknown key"),
        ({"tis_ratio_type": "row"}, SK + "tis_ratio_type=row: no such choice. Set one of null, token"),
        ({"token_tis_ratio_clip_high": "2"}, SK + "token_tis_ratio_clip_high='2': expected a number"),
        ({"tis_ratio_type": "token", "token_tis_ratio_clip_high": None}, SK + "token_tis_ratio_clip_high=null"),
        ({"token_tis_ratio_clip_high": 1e9}, SK + "token_tis_ratio_clip_high=1000000000.0: log-ratios"),
        ({"geo_mask_low": -1}, SK + "geo_mask_low=-1: ratios are positive"),
        ({"sequence_mask_metric": "geometric", "geo_mask_low": 1.1}, SK + "geo_mask_low=1.1 with "),
        ({"sequence_mask_metric": "geometric", "geo_mask_low": None}, SK + "geo_mask_low=null with "),
        ({"token_mask_is_threshold_low": 0.5}, SK + "token_mask_is_threshold_high=null with "),
        ("token", "SkyRL=token: expected a mapping"),
    ],
    "trl": [
        ({"score_centering": True}, "score_centering=true: score centering needs"),
        ({f"{TR}mode": "token_mask", "importance_sampling_level": "sequence"}, "=sequence: TRL multiplies"),
        ({f"{TR}mode": "mask"}, TR + "mode=mask: no such choice. Set one of"),
        ({f"{TR}correction": 1}, TR + "correction=1: not a truth value."),
        ({f"{TR}clip_max": None}, TR + "clip_max=null with "),
        ({f"{TR}clip_min": 4.0}, TR + "clip_min=4.0 with "),
        ({f"{TR}clip_min": 0.0}, TR + "clip_min=0.0: ratios are positive"),
        ({"off_policy_mask_threshold": -0.1}, "off_policy_mask_threshold=-0.1: expected a mean"),
        (None, "TRL=null: expected a mapping"),
    ],
    "verl": [
        ({"rollout_token_veto_threshold": 1e-4}, VE + "rollout_token_veto_threshold=0.0001: unknown key"),
        ({"rollout_is": "geometric"}, VE + "rollout_is=geometric: no such choice. Set one of null"),
        (cap(None), VE + "rollout_is_threshold=null: verl ignores"),
        (cap(0.52), VE + "rollout_is_threshold=0.52: a cap"),
        (cap("2_0.5"), "'2_0.5': nothing lies between"),
        (cap("1_0_2"), "'1_0_2': no number. Set one bound such as"),
        (cap("-1_2"), "'-1_2': bounds are positive"),
        (cap("1e-10_2"), "=1e-10: log-ratios are clamped"),
        ({"rollout_is_batch_normalize": True}, VE + "rollout_is_batch_normalize=true with"),
        ({"rollout_is_batch_normalize": "yes"}, VE + "rollout_is_batch_normalize=yes"),
        (
            TOKEN | {"rollout_is_batch_normalize": True, "bypass_mode": True, "loss_type": "reinforce"},
            f"{VE}rollout_is_batch_normalize=true with {VE}bypass_mode=true",
        ),
        (
            {"rollout_rs": "token_k1"},
            f"{VE}rollout_rs_threshold=null with {VE}rollout_rs=token_k1: nothing is rejected",
        ),
        ({"rollout_rs_threshold": 2.0}, f"{VE}rollout_rs_threshold=2.0 with {VE}rollout_rs="),
        (reject("seq_max_k1", 2), "'seq_max_k1' is unknown"),
        (reject(" , ", 2), VE + "rollout_rs=' , ': expected names"),
        (reject("token_k1", 0.52), "which is empty below 1. YAML"),
        (reject("token_k2", "0.1_2"), "token_k2 has only an upper bound"),
        (reject("token_k2", "1,2"), "there are 2 thresholds for 1 options"),
        (reject("token_k2", [1.0]), VE + "rollout_rs_threshold=[1.0]"),
        ({"loss_type": "reinforce"}, VE + "loss_type=reinforce with"),
        ({"bypass_mode": None}, VE + "bypass_mode=null: not a truth value. Set true or false"),
        (3, "verl=3: expected a mapping"),
    ],
}
ROWS = [(name, *row) for name, rows in REFUSED.items() for row in rows]


@pytest.mark.parametrize(("framework", "source", "message"), ROWS, ids=[message[:50] for *_, message in ROWS])
def test_what_has_no_equivalent_is_named_in_the_frameworks_own_key(framework: str, source: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        CorrectionSpec.from_peer(framework, source)
    assert message in str(caught.value)
