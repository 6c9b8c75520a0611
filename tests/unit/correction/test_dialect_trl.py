"""Corrections in TRL's keys decide what TRL decides, stated here again token by token from its published rules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.dialect_rows import Row, coefficients, rectangle, rows, small
from tests.support.examples import at_most

from_trl = CorrectionSpec.from_trl

TRL: dict[str, Any] = {
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "off_policy_mask_threshold": None,
}


def trl_row(
    given_keys: Mapping[str, Any], log_rho: list[float], log_r: list[float], advantage: float, valid: list[bool]
) -> list[float]:
    """log_rho = log(pi_old / mu), log_r = log(pi / pi_old); float64."""
    key = TRL | dict(given_keys)
    mask = [float(v) for v in valid]
    weight = [1.0] * len(mask)
    if key["vllm_importance_sampling_correction"]:
        level, action = key["vllm_importance_sampling_mode"].split("_")
        drift = [d * m for d, m in zip(log_rho, mask, strict=True)]
        ratio = [math.exp(sum(drift))] * len(mask) if level == "sequence" else [math.exp(d) for d in drift]
        low, high = key["vllm_importance_sampling_clip_min"], key["vllm_importance_sampling_clip_max"]
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        if action == "truncate":
            weight = [min(max(r, low), high) for r in ratio]
        else:
            weight = [r if low <= r <= high else 0.0 for r in ratio]
    keep = 1.0
    if key["off_policy_mask_threshold"] is not None:
        gap = -sum((a + b) * m for a, b, m in zip(log_rho, log_r, mask, strict=True)) / max(sum(mask), 1.0)
        keep = float(advantage >= 0 or gap <= key["off_policy_mask_threshold"])
    return [w * m * keep for w, m in zip(weight, mask, strict=True)]


trl_keys = st.fixed_dictionaries(
    {},
    optional={
        "vllm_importance_sampling_correction": st.booleans(),
        "vllm_importance_sampling_mode": st.sampled_from(
            ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
        ),
        "vllm_importance_sampling_clip_max": st.sampled_from([1.2, 2, 3.0]),
        "vllm_importance_sampling_clip_min": st.sampled_from([None, 0.3, 0.9]),
        "off_policy_mask_threshold": st.sampled_from([None, 0.0, 0.03, 0.3]),
    },
)


@settings(max_examples=at_most(250))
@given(trl_keys, rows, st.data())
def test_trl_decides_the_same(keys: dict[str, Any], data: list[Row], draw: st.DataObject) -> None:
    log_rho, mask = rectangle(data)
    log_r = torch.tensor(draw.draw(st.lists(small, min_size=mask.numel(), max_size=mask.numel()))).view(mask.shape)
    advantages = draw.draw(st.lists(st.sampled_from([-1.5, 0.0, 0.5]), min_size=len(data), max_size=len(data)))
    got = coefficients(
        from_trl(keys),
        old=log_rho,
        mu=torch.zeros_like(log_rho),
        mask=mask,
        pi=log_rho + log_r,
        advantages=advantages,
    )
    for i, (values, valid) in enumerate(data):
        expected = trl_row(keys, values, log_r[i, : len(values)].tolist(), advantages[i], valid)
        # TRL's weights may fall below e^-20, ours may not.
        torch.testing.assert_close(got[i, : len(values)], torch.tensor(expected).float(), rtol=1e-5, atol=2.1e-9)


def test_trl_defaults_drop_a_row_and_keep_its_ratio_as_weight() -> None:
    """clip_max = 3: a row of product e^1 = 2.718 keeps it as weight, a row of product e^1.5 = 4.48 is dropped."""
    log_rho = torch.tensor([[0.5, 0.5], [1.0, 0.5]])
    spec = from_trl({})
    assert spec == from_trl(TRL) == CorrectionSpec.from_trl({})
    got = coefficients(spec, old=log_rho, mu=torch.zeros(2, 2), mask=torch.ones(2, 2))
    torch.testing.assert_close(got, torch.tensor([[math.e, math.e], [0.0, 0.0]]))


def test_trl_bounds_may_be_open() -> None:
    """Products e^1 = 2.718 and e^-1 = 0.368 with clip_min = 0.5 alone: the second is raised to it, or dropped."""
    log_rho = torch.tensor([[1.0], [-1.0]])
    stem = "vllm_importance_sampling"
    for mode, second in (("token_truncate", 0.5), ("token_mask", 0.0), ("sequence_mask", 0.0)):
        keys = {f"{stem}_mode": mode, f"{stem}_clip_min": 0.5, f"{stem}_clip_max": None}
        got = coefficients(from_trl(keys), old=log_rho, mu=torch.zeros(2, 1), mask=torch.ones(2, 1))
        torch.testing.assert_close(got, torch.tensor([[math.e], [second]]))


def test_trl_reads_a_config_object_and_leaves_its_other_fields_alone() -> None:
    config = SimpleNamespace(**TRL | {"off_policy_mask_threshold": 0.5}, learning_rate=1e-6)
    assert from_trl(config) == from_trl({"off_policy_mask_threshold": 0.5})
    assert from_trl({"vllm_importance_sampling_correction": False}).is_none
