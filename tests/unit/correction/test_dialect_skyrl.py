"""Corrections in SkyRL's keys decide what SkyRL decides, stated here again token by token from its published rules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.dialect_rows import Row, coefficients, rectangle, rows
from tests.support.examples import at_most

from_skyrl = CorrectionSpec.from_skyrl

SKYRL: dict[str, Any] = {
    "tis_ratio_type": None,
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None,
    "geo_mask_high": 1.01,
    "geo_mask_low": 0.99,
    "product_mask_high": 2.0,
    "product_mask_low": 0.5,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}


def skyrl_exp(value: float) -> np.float32:
    return np.exp(np.clip(np.float32(value), np.float32(-20), np.float32(20)), dtype=np.float32)


def skyrl_row(given_keys: Mapping[str, Any], log_ratio: list[float], valid: list[bool]) -> list[float]:
    """Outlier mask, token mask, weight, sequence mask; each sees the loss mask that the ones before it left."""
    key = SKYRL | dict(given_keys)
    mask = [float(v) for v in valid]
    ratio = [skyrl_exp(d) for d in log_ratio]
    low, high = key["outlier_token_is_threshold_low"], key["outlier_token_is_threshold_high"]
    for r, counts in zip(ratio, valid, strict=True):
        if counts and ((high is not None and r > high) or (low is not None and r < low)):
            mask = [0.0] * len(mask)
    low, high = key["token_mask_is_threshold_low"], key["token_mask_is_threshold_high"]
    if low is not None and high is not None:
        mask = [m if low <= r <= high else 0.0 for m, r in zip(mask, ratio, strict=True)]
    total = sum(d * m for d, m in zip(log_ratio, mask, strict=True))
    weight: list[float] = [1.0] * len(mask)
    if key["tis_ratio_type"] == "token":
        weight = [min(float(r), key["token_tis_ratio_clip_high"]) for r in ratio]
    elif key["tis_ratio_type"] == "sequence":
        weight = [min(float(skyrl_exp(total)), key["sequence_tis_ratio_clip_high"])] * len(mask)
    kept = True
    if key["sequence_mask_metric"] == "geometric":
        statistic = skyrl_exp(total / max(sum(mask), 1.0))
        kept = not statistic > key["geo_mask_high"] and not statistic < key["geo_mask_low"]
    elif key["sequence_mask_metric"] == "product":
        statistic = skyrl_exp(total)
        kept = not statistic > key["product_mask_high"] and not statistic < key["product_mask_low"]
    return [w * m * kept for w, m in zip(weight, mask, strict=True)]


@st.composite
def skyrl_keys(draw: st.DrawFn) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if draw(st.booleans()):
        keys["tis_ratio_type"] = draw(st.sampled_from(["token", "sequence"]))
        keys["token_tis_ratio_clip_high"] = draw(st.sampled_from([1.5, 2.0, 5.0]))
        keys["sequence_tis_ratio_clip_high"] = draw(st.sampled_from([2.0, 5.0, 10.0]))
    keys["sequence_mask_metric"] = draw(st.sampled_from([None, "geometric", "product"]))
    if draw(st.booleans()):
        keys |= {"geo_mask_high": 1.2, "geo_mask_low": 0.7, "product_mask_high": 7.0, "product_mask_low": 0.3}
    keys["outlier_token_is_threshold_low"] = draw(st.sampled_from([None, 1e-4, 0.1]))
    keys["outlier_token_is_threshold_high"] = draw(st.sampled_from([None, 100.0, 8]))
    if draw(st.booleans()):
        keys |= {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
    return keys


def assert_like_skyrl(keys: dict[str, Any], data: list[Row]) -> None:
    log_ratio, mask = rectangle(data)
    got = coefficients(from_skyrl(keys), old=log_ratio, mu=torch.zeros_like(log_ratio), mask=mask)
    for i, (values, valid) in enumerate(data):
        expected = torch.tensor(skyrl_row(keys, values, valid), dtype=torch.float32)
        torch.testing.assert_close(got[i, : len(values)], expected, rtol=2e-6, atol=0)


@settings(max_examples=at_most(250))
@given(skyrl_keys(), rows)
def test_skyrl_decides_the_same(keys: dict[str, Any], data: list[Row]) -> None:
    assert_like_skyrl(keys, data)


def test_skyrl_sequence_statistics_see_what_the_token_mask_left() -> None:
    """Ratios e^0.25, e^1.5, e^-1.75 multiply to 1; without the two outside [0.5, 2] the rest gives e^0.25 = 1.284."""
    keys = {"tis_ratio_type": "sequence", "token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
    spec = from_skyrl(keys)
    assert spec.skyrl_compat
    log_ratio = torch.tensor([[0.25, 1.5, -1.75]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = coefficients(spec, old=log_ratio, mu=torch.zeros(1, 3), mask=mask)
    torch.testing.assert_close(got, torch.tensor([[math.exp(0.25), 0.0, 0.0]]))


def test_skyrl_order_is_reproduced_only_where_it_could_matter() -> None:
    outlier, token = {"outlier_token_is_threshold_high": 100}, {"token_mask_is_threshold_low": 0.5}
    token |= {"token_mask_is_threshold_high": 2.0}
    by_sequence: list[dict[str, Any]] = [{"sequence_mask_metric": "geometric"}, {"tis_ratio_type": "sequence"}]
    for later in by_sequence:
        assert not from_skyrl(later).skyrl_compat
        assert not from_skyrl(outlier | later).skyrl_compat
        assert from_skyrl(token | later).skyrl_compat
    assert not from_skyrl(outlier | token | {"tis_ratio_type": "token"}).skyrl_compat


def test_skyrl_defaults() -> None:
    assert from_skyrl({}).is_none
    assert from_skyrl(SimpleNamespace(**SKYRL)).is_none
    for level, metric in (("token", "geometric"), ("sequence", "product")):
        keys = {"tis_ratio_type": level, "sequence_mask_metric": metric}
        assert from_skyrl(keys) == from_skyrl(SKYRL | keys) == from_skyrl(OmegaConf.create(keys))
