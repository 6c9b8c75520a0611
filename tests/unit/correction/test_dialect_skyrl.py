"""Corrections in SkyRL's keys: order of the parts, and defaults. tests/conformance compares with SkyRL itself."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.dialect_rows import coefficients

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


def test_skyrl_sequence_statistics_see_what_the_token_mask_left() -> None:
    """Ratios e^0.25, e^1.5, e^-1.75 multiply to 1; without the two outside [0.5, 2] the rest gives e^0.25 = 1.284."""
    keys = {"tis_ratio_type": "sequence", "token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
    spec = from_skyrl(keys)
    assert spec.skyrl_compat
    log_ratio = torch.tensor([[0.25, 1.5, -1.75]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = coefficients(spec, old=log_ratio, mu=torch.zeros(1, 3), mask=mask)
    torch.testing.assert_close(got, torch.tensor([[math.exp(0.25), 0.0, 0.0]]))


def test_skyrl_defaults() -> None:
    assert from_skyrl({}).is_none
    assert from_skyrl(SimpleNamespace(**SKYRL)).is_none
    for level, metric in (("token", "geometric"), ("sequence", "product")):
        keys = {"tis_ratio_type": level, "sequence_mask_metric": metric}
        assert from_skyrl(keys) == from_skyrl(SKYRL | keys) == from_skyrl(OmegaConf.create(keys))
