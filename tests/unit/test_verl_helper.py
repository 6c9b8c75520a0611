"""The compiled sweep against torch operations and against sums worked out in plain Python, token by token."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recipe.offpolicy.translate import _batch, verl_rollout_correction
from recipe.offpolicy.verl_helper.by_sweep import SweptBatch
from recipe.offpolicy.verl_helper.by_torch import TorchBatch
from recipe.offpolicy.verl_helper.columns import Columns, Quantity

pytest.importorskip("verl")

LOG2 = math.log(2.0)
QUANTITIES = [
    Quantity("raw", -LOG2, LOG2),
    Quantity("capped", -LOG2, LOG2, (0.5, 2.0)),
    Quantity("banded", -LOG2, LOG2, (0.5, 2.0)),
    Quantity("k1", -LOG2, LOG2),
    Quantity("k2", -math.inf, 0.1),
    Quantity("k3", -math.inf, 0.1),
]


def drawn(rows: int, width: int, *, seed: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """pi_old, mu and an int64 mask with holes, empty rows, and what is not finite on and off the mask."""
    generator = torch.Generator().manual_seed(seed)
    mu = -2 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    old = mu + scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = (torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=generator)).long()
    mask &= (torch.rand(rows, width, generator=generator) < 0.9).long()
    strange = torch.rand(rows, width, generator=generator)
    mu[strange < 0.02] = -math.inf
    old[strange > 0.98] = math.nan
    return old.to(dtype), mu.to(dtype), mask


def assert_same(got: Any, expected: Any, **tolerance: float) -> None:
    for field in fields(expected):
        value = getattr(expected, field.name)
        if isinstance(value, Tensor):
            torch.testing.assert_close(getattr(got, field.name), value, **tolerance, equal_nan=True, msg=field.name)
        else:
            assert getattr(got, field.name) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.int32, torch.float32])
def test_both_ways_agree(dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    old, mu, mask = drawn(23, 61, seed=3, scale=0.4, dtype=dtype)
    mask = mask.to(mask_dtype)
    swept, plain = SweptBatch(old, mu, mask), TorchBatch(old, mu, mask)
    (columns, measures), (reference, of_torch) = swept.sweep(QUANTITIES), plain.sweep(QUANTITIES)
    assert_same(columns, reference, rtol=1e-12, atol=1e-13)
    for measure, expected in zip(measures, of_torch, strict=True):
        assert_same(measure, expected, rtol=1e-12, atol=1e-13)
    for quantity in QUANTITIES[1:3]:
        weights, expected_weights = (each.token_weights(quantity, 1.5) for each in (swept, plain))
        assert weights.dtype == expected_weights.dtype
        # Both round one float64 to float32, which may lie between two of them.
        torch.testing.assert_close(weights, expected_weights, rtol=2e-7, atol=0)
    of_rows = torch.rand(23, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(swept.row_weights(of_rows), plain.row_weights(of_rows))
    (kept, gone), (expected_kept, expected_gone) = (each.kept(of_rows > 0.7, QUANTITIES[3:]) for each in (swept, plain))
    assert kept.dtype == mask_dtype
    assert torch.equal(kept, expected_kept)
    assert torch.equal(gone, expected_gone)
    assert 0 < gone.sum() < reference.tokens.sum()


@pytest.mark.parametrize("layout", ["transposed", "sliced", "mixed dtypes", "with a gradient"])
def test_tensors_that_cannot_be_read_as_they_lie(layout: str) -> None:
    old, mu, mask = drawn(12, 300, seed=5, scale=0.2, dtype=torch.float32)
    expected = SweptBatch(old, mu, mask).sweep(QUANTITIES)
    if layout == "transposed":
        other = SweptBatch(old.T.contiguous().T, mu.T.contiguous().T, mask.T.contiguous().T)
    elif layout == "sliced":
        other = SweptBatch(*(torch.nn.functional.pad(each, (3, 5))[:, 3:-5] for each in (old, mu, mask)))
    elif layout == "mixed dtypes":
        other = SweptBatch(old.double(), mu, mask)
    else:
        other = SweptBatch(old.requires_grad_(), mu, mask)
    columns, measures = other.sweep(QUANTITIES)
    assert_same(columns, expected[0], rtol=0, atol=0)
    for measure, reference in zip(measures, expected[1], strict=True):
        assert_same(measure, reference, rtol=0, atol=0)


def test_by_hand() -> None:
    """Two tokens of ratio 3 and 1/2, one off the mask, one of mu = -inf."""
    old = torch.tensor([[math.log(0.6), math.log(0.2), 99.0, -1.0]])
    mu = torch.tensor([[math.log(0.2), math.log(0.4), 0.0, -math.inf]])
    columns, measures = SweptBatch(old, mu, torch.tensor([[1, 1, 0, 1]])).sweep(QUANTITIES)
    found = {field.name: float(getattr(columns, field.name)) for field in fields(Columns)}
    up, down = math.log(3.0), math.log(0.5)
    assert found == pytest.approx(
        {
            "response": 3,
            "tokens": 2,
            "old": math.log(0.12),
            "rollout": math.log(0.08),
            "log_ratio": math.log(1.5),
            "k2": (up**2 + down**2) / 2,
            "k3": (3 - 1 - up) + (0.5 - 1 - down),
            "k2_max": up**2 / 2,
            "k3_max": 3 - 1 - up,
            "chi2": (9 - 1) + (0.25 - 1),
        },
        rel=1e-6,
    )
    raw, capped, banded = measures[:3]
    # 3 lies above the band [1/2, 2], and 1/2 on its edge, which float32 log-probs may miss by a rounding.
    assert (float(raw.total), float(raw.greatest), float(raw.least)) == pytest.approx((3.5, 3.0, 0.5), rel=1e-6)
    assert float(raw.above) == 1
    assert float(capped.total) == pytest.approx(2.5, rel=1e-6)
    # About 1: (2 - 1) + (1/2 - 1), and their squares.
    assert float(capped.deviation) == pytest.approx(0.5, rel=1e-6)
    assert float(capped.squared_deviation) == pytest.approx(1.25, rel=1e-6)
    assert float(banded.greatest) <= 0.5 * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1e-8, 1e-4, 0.24, 0.26, 3.0, 60.0]))
def test_ratios_of_any_size(seed: int, scale: float) -> None:
    """The series near 1, exp beyond it, and the clamp at 20 nats meet without a step."""
    old, mu, mask = drawn(4, 50, seed=seed, scale=scale, dtype=torch.float64)
    columns, measures = SweptBatch(old, mu, mask).sweep(QUANTITIES[:1])
    reference, of_torch = TorchBatch(old, mu, mask).sweep(QUANTITIES[:1])
    # k3 of ratios near 1 is a difference of numbers near each other: to 1e-16 of what is subtracted.
    assert_same(columns, reference, rtol=1e-11, atol=1e-15 * 50 * (1 + scale))
    assert_same(measures[0], of_torch[0], rtol=1e-11, atol=1e-14)


def test_long_rows_to_the_float64_reference() -> None:
    """32 768 tokens a row: sums and weights to 1e-5 of exact ones from the same float32 log-probs."""
    old, mu, mask = drawn(3, 32_768, seed=9, scale=0.02, dtype=torch.float32)
    mask[:] = 1
    _, _, metrics = verl_rollout_correction(old, mu, mask, rollout_is="token")
    valid = torch.isfinite(old) & torch.isfinite(mu)
    rows = [
        [float(p) - float(q) for p, q in zip(o[v], m[v], strict=True)] for o, m, v in zip(old, mu, valid, strict=True)
    ]
    ratios = [math.exp(x) for row in rows for x in row]
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(
        math.fsum(min(r, 2.0) for r in ratios) / len(ratios), rel=1e-9
    )
    k3 = math.fsum(math.expm1(x) - x for row in rows for x in row) / len(ratios)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(k3, rel=1e-7)
    chi2 = sum(math.expm1(2 * math.fsum(row)) for row in rows) / len(rows)
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx(chi2, rel=1e-9)


def test_the_mask_is_copied_only_if_something_is_rejected() -> None:
    old, mu = torch.full((2, 3), -1.0), torch.full((2, 3), -1.0)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert verl_rollout_correction(old, mu, mask, rollout_rs="token_k1", rollout_rs_threshold=2.0)[1] is mask
    old[0, 1] = 0.0
    kept = verl_rollout_correction(old, mu, mask, rollout_rs="token_k1", rollout_rs_threshold=2.0)[1]
    assert kept.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    mu[1, 2] = -math.inf
    assert verl_rollout_correction(old, mu, mask, rollout_is="token")[1].tolist() == [[1, 1, 0], [1, 1, 0]]


def test_who_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops on the CPU; torch elsewhere, and where there is no numba."""
    tensors = torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1)
    assert isinstance(_batch(*tensors), SweptBatch)
    assert isinstance(_batch(*(tensor.to("meta") for tensor in tensors)), TorchBatch)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(_batch(*tensors), TorchBatch)
