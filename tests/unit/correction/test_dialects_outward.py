"""Corrections in the keys of SkyRL, TRL and verl: round trips, and corrections that these cannot express."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from tests.support.corrections import GSM, M2PO, TIS, band, opsm

STEM = "vllm_importance_sampling"
PARTS: dict[str, list[list[dict[str, Any]]]] = {
    "skyrl": [
        [{}, {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.5}, {"tis_ratio_type": "sequence"}],
        [{}, {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9}, {"sequence_mask_metric": "product"}],
        [{}, {"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100.0}],
        [{}, {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 1.5}],
    ],
    "trl": [
        [{f"{STEM}_correction": False}, *({f"{STEM}_mode": f"{level}_mask"} for level in ("token", "sequence"))],
        [{}, {f"{STEM}_mode": "token_truncate"}, {f"{STEM}_mode": "sequence_truncate", f"{STEM}_clip_max": 100.0}],
        [{}, {f"{STEM}_clip_min": 0.5}],
        [{}, {"off_policy_mask_threshold": 0.0}, {"off_policy_mask_threshold": 0.5}],
    ],
    "verl": [
        [{}, {"bypass_mode": True}, {"bypass_mode": True, "loss_type": "reinforce"}],
        [{}, *({"rollout_is": "token", "rollout_is_threshold": cap} for cap in (2.0, "0.8", "0.5_1.5"))],
        [{}, {"rollout_is": "sequence"}],
        [{}, {"rollout_is_batch_normalize": True}],
        [
            {},
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"},
            {"rollout_rs": "seq_sum_k1,seq_mean_k3,token_k2", "rollout_rs_threshold": "0.9_1.5,0.1,2.0"},
            {"rollout_rs": "seq_mean_k1,seq_max_k2,seq_max_k3", "rollout_rs_threshold": "0.99_1.01,0.1,2.0"},
        ],
    ],
}
"""Keys of each framework in parts; every combination is tried."""


def nearly(one: dict[str, Any]) -> Any:
    """The plain values with bounds to 12 digits, because 1 / (1 / x) may differ in the last digit."""
    return {
        key: nearly(value) if isinstance(value, dict) else float(f"{value:.12g}") if type(value) is float else value
        for key, value in one.items()
    }


@pytest.mark.parametrize("name", PARTS)
def test_what_a_framework_says_comes_back_from_ours(name: str) -> None:
    said = 0
    for parts in itertools.product(*PARTS[name]):
        keys = {key: value for part in parts for key, value in part.items()}
        try:
            ours = CorrectionSpec.from_peer(name, keys)
        except SpecError:
            continue
        back = CorrectionSpec.from_peer(name, getattr(ours, f"to_{name}")())
        assert nearly(back.to_mapping()) == nearly(ours.to_mapping()), keys
        said += 1
    assert said >= 24


NEGATIVE = TIS | {"when": "negative"}
EVERYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"weights": {"a": NEGATIVE}}, "correction.weights="),
    ({"masks": {"m": GSM}, "denominator": "kept"}, "correction.denominator=kept"),
    ({"masks": {"m": GSM}, "nonfinite": "excluded"}, "correction.nonfinite=excluded"),
    ({"masks": {"m": GSM}, "baseline": "exclude"}, "correction.baseline=exclude"),
    ({"kl_clip": {"lower": 0.8, "upper": 1.2}}, "correction.kl_clip="),
    ({"kl_weight": {"ratio": "ppo", "upper": None}}, "correction.kl_weight="),
    ({"penalty": {"ratio": "full", "coefficient": 0.1}}, "correction.penalty="),
    ({"proximal": "reuse"}, "correction.proximal=reuse"),
    ({"proximal": "loglinear", "alpha": 0.5}, "correction.alpha=0.5"),
    ({"weight": TIS | {"level": "turn"}}, "correction.weight.level=turn"),
    ({"weight": TIS | {"aggregate": "geometric", "level": "sequence"}}, "correction.weight.aggregate=geometric"),
    ({"weight": TIS | {"by_staleness": [1.0, 2.0]}}, "correction.weight.by_staleness="),
    ({"masks": {"m": M2PO}}, "correction.masks.m"),
    ({"masks": {"m": GSM | {"level": "turn"}}}, "correction.masks.m"),
    ({"masks": {"m": opsm(0.1, ratio="ppo")}}, "correction.masks.m"),
    ({"masks": {"m": {"aggregate": "staleness", "level": "token", "upper": 4}}}, "correction.masks.m"),
    ({"masks": {"m": band(None, 0.1, aggregate="binary_kl")}}, "correction.masks.m"),
    ({"support": "engine", "weight": TIS}, "correction.support=engine"),
    ({"allow_truncated_sampling": True, "weight": TIS}, "correction.allow_truncated_sampling=true"),
]


REFUSED = [(name, *row) for row in EVERYWHERE for name in ("skyrl", "trl", "verl")]
REFUSED += [
    ("skyrl", {"weight": TIS | {"kind": "clip", "lower": 0.5}}, "correction.weight.kind=clip"),
    ("skyrl", {"masks": {"a": GSM, "b": band(0.5, 2.0, aggregate="product")}}, "correction.masks.b"),
    ("skyrl", {"masks": {"a": GSM, "b": band(0.5, 2.0, level="token", aggregate="any")}}, "correction.skyrl"),
    ("skyrl", {"masks": {"a": band(None, 1.01)}}, "correction.masks.a"),
    ("trl", {"masks": {"a": GSM}}, "correction.masks.a"),
    ("trl", {"masks": {"a": opsm(0.1), "b": opsm(0.2)}}, "correction.masks.b"),
    ("trl", {"weight": TIS | {"normalize": True}}, "correction.weight.normalize=true"),
    ("trl", {"weight": TIS | {"upper": None}}, "correction.weight.upper=null"),
    ("verl", {"weight": TIS | {"kind": "clip", "lower": 0.5}}, "correction.weight.kind=clip"),
    ("verl", {"weight": TIS | {"kind": "reject"}}, "correction.weight.lower=null"),
    ("verl", {"masks": {"a": band(None, 1.01)}}, "correction.masks.a"),
    ("verl", {"masks": {"a": GSM, "b": GSM}}, "correction.masks.b"),
    ("verl", {"masks": {"a": band(0.1, 0.5, aggregate="k3_mean")}}, "correction.masks.a"),
]


@pytest.mark.parametrize(("name", "mapping", "key"), REFUSED)
def test_what_a_framework_cannot_say_is_named(name: str, mapping: dict[str, Any], key: str) -> None:
    with pytest.raises(SpecError) as caught:
        getattr(CorrectionSpec.from_mapping(mapping), f"to_{name}")()
    assert str(caught.value).startswith(key), str(caught.value)
