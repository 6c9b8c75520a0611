"""What holds of corrections in the keys of SkyRL, TRL and verl alike: errors in their own keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec, SpecError

from_skyrl, from_trl, from_verl = CorrectionSpec.from_skyrl, CorrectionSpec.from_trl, CorrectionSpec.from_verl

SK, TR, VE = "off_policy_correction.", "vllm_importance_sampling_", "algorithm.rollout_correction."


@pytest.mark.parametrize(
    ("translate", "keys", "message"),
    [
        (from_skyrl, {"tis_ratio": "token"}, SK + "tis_ratio=token: unknown key"),
        (
            from_skyrl,
            {"tis_ratio_type": "row"},
            SK + "tis_ratio_type=row: no such choice. Set one of null, token",
        ),
        (from_skyrl, {"token_tis_ratio_clip_high": "2"}, SK + "token_tis_ratio_clip_high='2': expected a number"),
        (
            from_skyrl,
            {"tis_ratio_type": "token", "token_tis_ratio_clip_high": None},
            SK + "token_tis_ratio_clip_high=null",
        ),
        (from_skyrl, {"token_tis_ratio_clip_high": 1e9}, SK + "token_tis_ratio_clip_high=1000000000.0: log-ratios"),
        (from_skyrl, {"geo_mask_low": -1}, SK + "geo_mask_low=-1: ratios are positive"),
        (from_skyrl, {"sequence_mask_metric": "mean"}, SK + "sequence_mask_metric=mean"),
        (from_skyrl, {"sequence_mask_metric": "geometric", "geo_mask_low": 1.1}, SK + "geo_mask_low=1.1 with "),
        (from_skyrl, {"sequence_mask_metric": "geometric", "geo_mask_low": None}, SK + "geo_mask_low=null with "),
        (from_skyrl, {"token_mask_is_threshold_low": 0.5}, SK + "token_mask_is_threshold_high=null with "),
        (from_skyrl, {"token_mask_is_threshold_high": 2.0}, SK + "token_mask_is_threshold_low=null with "),
        (from_skyrl, {"outlier_token_is_threshold_low": 0}, SK + "outlier_token_is_threshold_low=0: ratios"),
        (from_skyrl, "token", "SkyRL=token: expected a mapping"),
        (
            from_trl,
            {"vllm_importance_sampling_mode": "mask"},
            TR + "mode=mask: no such choice. Set one of",
        ),
        (
            from_trl,
            {"vllm_importance_sampling_mode": None},
            TR + "mode=null: no such choice. Set one of",
        ),
        (
            from_trl,
            {"vllm_importance_sampling_correction": 1},
            TR + "correction=1: not a truth value.",
        ),
        (from_trl, {"vllm_importance_sampling_clip_max": None}, TR + "clip_max=null with "),
        (from_trl, {"vllm_importance_sampling_clip_min": 4.0}, TR + "clip_min=4.0 with "),
        (from_trl, {"vllm_importance_sampling_clip_min": 0.0}, TR + "clip_min=0.0: ratios are positive"),
        (from_trl, {"off_policy_mask_threshold": -0.1}, "off_policy_mask_threshold=-0.1: expected a mean"),
        (from_trl, None, "TRL=null: expected a mapping"),
        (from_verl, {"rollout_token_veto_threshold": 1e-4}, VE + "rollout_token_veto_threshold=0.0001: unknown key"),
        (
            from_verl,
            {"rollout_is": "geometric"},
            VE + "rollout_is=geometric: no such choice. Set one of null",
        ),
        (
            from_verl,
            {"rollout_is": "token", "rollout_is_threshold": None},
            VE + "rollout_is_threshold=null: verl ignores",
        ),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": 0.52}, VE + "rollout_is_threshold=0.52: a cap"),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": True}, VE + "rollout_is_threshold=true"),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": "2_0.5"}, "'2_0.5': nothing lies between"),
        (
            from_verl,
            {"rollout_is": "token", "rollout_is_threshold": "1_0_2"},
            "'1_0_2': no number. Set one bound such as",
        ),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": "nan"}, VE + "rollout_is_threshold='nan'"),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": "-1_2"}, "'-1_2': bounds are positive"),
        (from_verl, {"rollout_is": "token", "rollout_is_threshold": "1e-10_2"}, "=1e-10: log-ratios are clamped"),
        (from_verl, {"rollout_is_batch_normalize": True}, VE + "rollout_is_batch_normalize=true with"),
        (from_verl, {"rollout_is_batch_normalize": "yes"}, VE + "rollout_is_batch_normalize=yes"),
        (
            from_verl,
            {
                "rollout_is": "token",
                "rollout_is_batch_normalize": True,
                "bypass_mode": True,
                "loss_type": "reinforce",
            },
            VE + "rollout_is_batch_normalize=true with algorithm.rollout_correction.bypass_mode=true",
        ),
        (
            from_verl,
            {"rollout_rs": "token_k1"},
            VE + "rollout_rs_threshold=null with " + VE + "rollout_rs=token_k1: nothing is rejected",
        ),
        (
            from_verl,
            {"rollout_rs_threshold": 2.0},
            VE + "rollout_rs_threshold=2.0 with algorithm.rollout_correction.rollout_rs=",
        ),
        (from_verl, {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, "'seq_max_k1' is unknown"),
        (from_verl, {"rollout_rs": " , ", "rollout_rs_threshold": 2}, VE + "rollout_rs=' , ': expected names"),
        (from_verl, {"rollout_rs": ["token_k1"], "rollout_rs_threshold": 2}, VE + "rollout_rs=[token_k1]"),
        (from_verl, {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.52}, "which is empty below 1. YAML"),
        (from_verl, {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_2"}, "token_k2 has only an upper bound"),
        (from_verl, {"rollout_rs": "token_k2", "rollout_rs_threshold": "1,2"}, "2 thresholds for the 1 options"),
        (from_verl, {"rollout_rs": "token_k2", "rollout_rs_threshold": [1.0]}, VE + "rollout_rs_threshold=[1.0]"),
        (from_verl, {"loss_type": "reinforce"}, VE + "loss_type=reinforce with"),
        (from_verl, {"loss_type": "ppo"}, VE + "loss_type=ppo: no such choice. Set one of ppo_clip, reinforce"),
        (from_verl, {"bypass_mode": None}, VE + "bypass_mode=null: not a truth value. Set true or false"),
        (from_verl, 3, "verl=3: expected a mapping"),
    ],
)
def test_errors_name_the_frameworks_own_key(
    translate: Callable[[Any], CorrectionSpec], keys: Any, message: str
) -> None:
    with pytest.raises(SpecError) as error:
        translate(keys)
    assert message in str(error.value)
