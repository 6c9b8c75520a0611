"""The compiled sweep, compared with torch operations and with per-token sums in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recipe.offpolicy.correction.row_layout import RowLayout, detect_layout
from recipe.offpolicy.translate.batch_sums import MEASURES, CompiledBatch, Quantity, QuantitySums, RowSums, TorchBatch
from recipe.offpolicy.translate.rollout_correction import verl_rollout_correction
from tests.support.examples import at_most

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
    """pi_old, mu and an int64 mask with holes, empty rows, and values that are not finite on and off the mask."""
    generator = torch.Generator().manual_seed(seed)
    mu = -2 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    old = mu + scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = (torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=generator)).long()
    mask &= (torch.rand(rows, width, generator=generator) < 0.9).long()
    strange = torch.rand(rows, width, generator=generator)
    mu[strange < 0.02] = -math.inf
    old[strange > 0.98] = math.nan
    return old.to(dtype), mu.to(dtype), mask


def nested(tensors: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first tokens of each row, packed."""
    first, *others = (
        torch.nested.as_nested_tensor(
            [row[:length].clone() for row, length in zip(tensor, lengths, strict=True)], layout=torch.jagged
        )
        for tensor in tensors
    )
    second, third = others
    return first, second, third


def packed_batch(lengths: Sequence[int], *, seed: int, scale: float, holes: float) -> tuple[Tensor, Tensor, Tensor]:
    """pi_old, mu in float32 and an int64 mask of rows with holes and with values that are not finite."""
    old, mu, _ = drawn(len(lengths), max(lengths), seed=seed, scale=scale, dtype=torch.float32)
    mask = torch.rand(old.shape, generator=torch.Generator().manual_seed(seed)) >= holes
    return nested((old, mu, mask.long()), lengths)


def flat(tensor: Tensor) -> Tensor:
    return tensor.values() if tensor.is_nested else tensor


def whole(old: Tensor, mu: Tensor, mask: Tensor) -> RowLayout:
    return detect_layout(old_log_prob=old, rollout_log_prob=mu, response_mask=mask)


def swept(*tensors: Tensor) -> CompiledBatch:
    return CompiledBatch(whole(*tensors), *tensors)


def plain(*tensors: Tensor) -> TorchBatch:
    return TorchBatch(whole(*tensors), *tensors)


def assert_same(got: tuple[RowSums, QuantitySums], expected: tuple[RowSums, QuantitySums], **tolerance: Any) -> None:
    for name in RowSums._fields:
        np.testing.assert_allclose(getattr(got[0], name), getattr(expected[0], name), **tolerance, err_msg=name)
    assert got[1].of_tokens.tolist() == expected[1].of_tokens.tolist()
    for name in MEASURES:
        np.testing.assert_allclose(got[1][name], expected[1][name], **tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("dtype", "mask_dtype", "packed"),
    [
        (torch.float32, torch.int64, False),
        (torch.float64, torch.bool, True),
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.int32, False),
    ],
)
def test_both_ways_agree(dtype: torch.dtype, mask_dtype: torch.dtype, packed: bool) -> None:
    old, mu, mask = drawn(23, 61, seed=3, scale=0.4, dtype=dtype)
    tensors = old, mu, mask.to(mask_dtype)
    if packed:
        tensors = nested(tensors, torch.randint(0, 62, (23,), generator=torch.Generator().manual_seed(2)).tolist())
    fast, slow = swept(*tensors), plain(*tensors)
    reference = slow.sweep(QUANTITIES)
    assert_same(fast.sweep(QUANTITIES), reference, rtol=1e-12, atol=1e-13)
    for quantity in QUANTITIES[1:3]:
        weights, expected_weights = (flat(each.compute_token_weights(quantity, 1.5)) for each in (fast, slow))
        assert weights.dtype == expected_weights.dtype
        # Both round one float64 to float32, which may lie between two of them.
        torch.testing.assert_close(weights, expected_weights, rtol=2e-7, atol=0)
    of_rows = torch.rand(23, generator=torch.Generator().manual_seed(1), dtype=torch.float64).numpy()
    assert torch.equal(flat(fast.spread_row_weights(of_rows)), flat(slow.spread_row_weights(of_rows)))
    (kept, gone), (expected_kept, expected_gone) = (
        each.apply_rejections(of_rows > 0.7, QUANTITIES[3:]) for each in (fast, slow)
    )
    assert kept.dtype == mask_dtype
    assert kept.is_nested == packed
    assert torch.equal(flat(kept), flat(expected_kept))
    np.testing.assert_array_equal(gone, expected_gone)
    assert 0 < gone.sum() < reference[0].tokens.sum()


def exact_metrics(old: Tensor, mu: Tensor, mask: Tensor) -> dict[str, float]:
    """Metrics of token weights capped at 2, by sums of math.fsum over Python floats; rows without a token are
    left out.
    """
    rows = [
        [(float(p), float(q)) for p, q, on in zip(o, m, k, strict=True) if on and math.isfinite(p) and math.isfinite(q)]
        for o, m, k in zip(old.tolist(), mu.tolist(), mask.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    drift = [p - q for row in rows for p, q in row]
    weights = [min(math.exp(x), 2.0) for x in drift]
    n = len(drift)
    mean = math.fsum(weights) / n
    return {
        "rollout_is_mean": mean,
        "rollout_is_max": max(weights),
        "rollout_is_min": min(weights),
        "rollout_is_std": math.sqrt(math.fsum((w - mean) ** 2 for w in weights) / n),
        "rollout_is_eff_sample_size": math.fsum(weights) ** 2 / (n * math.fsum(w * w for w in weights)),
        "kl": -math.fsum(drift) / n,
        "k3_kl": math.fsum(math.expm1(x) - x for x in drift) / n,
        "chi2_token": math.fsum(math.expm1(2 * x) for x in drift) / n,
        "chi2_seq": math.fsum(math.expm1(2 * math.fsum(p - q for p, q in row)) for row in rows) / len(rows),
        "training_ppl": math.fsum(math.exp(-math.fsum(p for p, _ in row) / len(row)) for row in rows) / len(rows),
        "rollout_ppl": math.fsum(math.exp(-math.fsum(q for _, q in row) / len(row)) for row in rows) / len(rows),
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_of", [swept, plain])
def test_long_rows_to_the_float64_reference(dtype: torch.dtype, batch_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 768 tokens per row with holes, values that are not finite, and a row without a token: exact sums of the given
    log-probs, so bfloat16 loses no more than its 8 bits.
    """
    monkeypatch.setattr(
        "recipe.offpolicy.translate.rollout_correction._batch", lambda rows, *tensors: batch_of(*tensors)
    )
    old, mu, mask = drawn(3, 32_768, seed=9, scale=0.02, dtype=dtype)
    mask[0] = (torch.arange(32_768) % 500 < 400).long()  # tool calls
    mask[1], mask[2] = 1, 0
    proto, _, metrics = verl_rollout_correction(old, mu, mask, rollout_is="token")
    for name, value in exact_metrics(old, mu, mask).items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-7), name
    valid = mask.bool() & torch.isfinite(old) & torch.isfinite(mu)
    exact = torch.where(valid, (old.double() - mu.double()).exp().clamp(max=2.0), 0.0)
    torch.testing.assert_close(proto.batch["rollout_is_weights"].double(), exact, rtol=1e-7, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rollout_is": "token", "rollout_is_batch_normalize": True},
        {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"},
        {"rollout_is": "token", "rollout_rs": "token_k1,seq_mean_k3,seq_max_k2", "rollout_rs_threshold": "2.0,0.1,0.4"},
    ],
)
@settings(max_examples=at_most(25))
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=5).filter(sum),
    seed=st.integers(0, 10_000),
    mask_dtype=st.sampled_from([torch.int64, torch.bool, torch.float32]),
    batch_of=st.sampled_from([swept, plain]),
)
def test_packed_rows_are_read_as_they_come(
    config: dict[str, Any], lengths: list[int], seed: int, mask_dtype: torch.dtype, batch_of: Any
) -> None:
    """Nested input gives nested output without padding, and equals the result for the padded rows."""
    packed = packed_batch(lengths, seed=seed, scale=0.3, holes=0.1)
    packed = packed[0], packed[1], packed[2].to(mask_dtype)
    padded = [torch.nested.to_padded_tensor(each, 0) for each in packed]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipe.offpolicy.translate.rollout_correction._batch", lambda rows, *tensors: batch_of(*tensors))
        try:
            expected = verl_rollout_correction(*padded, **config)
        except ValueError:  # not a token
            with pytest.raises(ValueError, match="no token"):
                verl_rollout_correction(*packed, **config)
            return
        patch.setattr(torch.Tensor, "to_padded_tensor", None)
        patch.setattr(torch.nested, "to_padded_tensor", None)
        proto, mask, metrics = verl_rollout_correction(*packed, **config)
    assert metrics.keys() == expected[2].keys()
    for key, value in expected[2].items():
        # The root of a difference of two sums keeps half of their digits.
        assert metrics[key] == pytest.approx(value, rel=1e-12, abs=1e-8 if key.endswith("_std") else 1e-15), key
    assert mask.is_nested
    assert mask.dtype == mask_dtype
    assert torch.equal(torch.nested.to_padded_tensor(mask, 0), expected[1])
    assert (proto is None) == (expected[0] is None)
    if proto is not None and expected[0] is not None:
        weights = proto.batch["rollout_is_weights"]
        (weights * packed[0]).sum()  # rows of one batch, also to torch
        assert torch.equal(torch.nested.to_padded_tensor(weights, 0), expected[0].batch["rollout_is_weights"])


def test_tensors_that_do_not_lie_alike_are_refused() -> None:
    old, mu, mask = packed_batch([3, 2], seed=0, scale=0.1, holes=0.0)
    with pytest.raises(ValueError, match=r"rollout_log_prob are nested, response_mask are not\. Pass all of them"):
        verl_rollout_correction(old, mu, torch.nested.to_padded_tensor(mask, 0))
    with pytest.raises(ValueError, match=r"rows of response_mask .* differ in length from those of old_log_prob"):
        verl_rollout_correction(old, mu, packed_batch([2, 3], seed=0, scale=0.1, holes=0.0)[2])
    strided = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.strided)
    with pytest.raises(ValueError, match=r"old_log_prob is nested with layout torch.strided .* layout=torch.jagged"):
        verl_rollout_correction(strided, mu, mask)
