"""Identities that hold for every correction, on any batch.

Log-probs are multiples of 1/64 above -4, so their differences and sums are exact in every dtype, and results can be
compared bitwise.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, StepStage
from recipe.offpolicy.correction.statistics import merge_all
from tests.support.corrections import on_host, values
from tests.support.drawn import Rows, batches, constants_of, corrections, decide, examples
from tests.support.examples import at_most


def same(one: StepStage, two: StepStage, *, statistics: bool = True, besides: str = "") -> None:
    """Compare keep and weights bitwise; normalised weights up to the rounding of the mean.

    Statistics are compared too, except those in ``besides``.
    """
    assert torch.equal(one.keep, two.keep)
    assert torch.allclose(one.weight, two.weight, rtol=2e-7, atol=0.0)
    if statistics:
        expected = values(two) | {key: value for key, value in values(one).items() if key == besides}
        assert values(one) == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)


# No-ops -----------------------------------------------------------------------------------------------------


@examples
@given(
    corrections(),
    batches(),
    draw.lists(draw.sampled_from([math.nan, math.inf, -math.inf, 1e30]), min_size=4, max_size=4),
)
def test_what_is_off_the_mask_is_never_read(correction: CorrectionSpec, rows: Rows, junk: list[float]) -> None:
    """Padding, tool tokens and their ids are never read; the holes of these masks are anywhere."""
    names = ("mu", "old", "pi", "advantages")
    filled = {
        name: torch.where(rows.mask, getattr(rows, name), torch.tensor(value))
        for name, value in zip(names, junk, strict=True)
    }
    ids = {name: torch.where(rows.mask, getattr(rows, name), 2**40) for name in ("turns", "versions")}
    step, clean = decide(correction, replace(rows, **filled, **ids)), decide(correction, rows)
    same(step, clean)
    assert not step.weight[~rows.mask].any()
    assert not step.keep[~rows.mask].any()


@examples
@given(corrections(), batches(), draw.integers(1, 3), draw.booleans())
def test_more_padding_changes_nothing(correction: CorrectionSpec, rows: Rows, columns: int, left: bool) -> None:
    """The same rows in a wider batch, padded on either side, as V1 does in every micro-batch."""
    sides = (columns, 0) if left else (0, columns)

    def pad(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, sides, value=0)

    wide = Rows(*(pad(getattr(rows, field.name)) for field in fields(rows)))
    step = decide(correction, wide)
    inner = slice(sides[0], sides[0] + rows.mask.shape[1])
    same(replace(step, weight=step.weight[:, inner], keep=step.keep[:, inner]), decide(correction, rows))
    outside = torch.ones_like(wide.mask)
    outside[:, inner] = False
    assert not step.weight[outside].any()
    assert not step.keep[outside].any()


@examples
@given(
    corrections(),
    batches(),
    draw.sampled_from(["mu", "old"]),
    draw.sampled_from([math.nan, math.inf, -math.inf]),
    draw.data(),
)
def test_a_token_without_mu_or_pi_old_is_as_if_masked(
    correction: CorrectionSpec, rows: Rows, policy: str, bad: float, data: Any
) -> None:
    size = rows.mask.numel()
    holes = torch.tensor(data.draw(draw.lists(draw.booleans(), min_size=size, max_size=size)), dtype=torch.bool)
    holes = holes.reshape(rows.mask.shape)
    broken = torch.where(holes, torch.tensor(bad), getattr(rows, policy))
    step, masked = (
        decide(correction, replace(rows, **{policy: broken})),
        decide(correction, replace(rows, mask=rows.mask & ~holes)),
    )
    same(step, masked, statistics=False)
    ours, theirs = values(step), values(masked)
    # What is counted of the response mask, as ages are, and turns, which are its runs.
    counted = {
        name
        for name in ours
        if name.startswith(("nonfinite/", "keep/", "turn/", "length/", "staleness/m"))
        or name.endswith(("token_share", "masked"))
    }
    assert {n: v for n, v in ours.items() if n not in counted} == pytest.approx(
        {n: v for n, v in theirs.items() if n not in counted}, nan_ok=True
    )
    count = {"mu": "nonfinite/rollout_log_prob", "old": "nonfinite/old_log_prob"}
    assert ours[count[policy]] == (holes & rows.mask).sum()


# Rows are independent ---------------------------------------------------------------------------------------


@examples
@given(corrections(), batches(min_rows=1), draw.integers(0, 4), draw.integers(0, 4))
def test_micro_batches_add_up_to_the_whole(correction: CorrectionSpec, rows: Rows, one: int, two: int) -> None:
    """With the batch's constants, weight, keep and every statistic equal those of the whole batch; an empty part does
    no harm.
    """
    low, high = sorted((one, two))
    constants = constants_of(correction, rows)
    parts = [decide(correction, rows[part], constants) for part in (slice(0, low), slice(low, high), slice(high, None))]
    whole = decide(correction, rows)
    merged = merge_all(on_host(part.statistics) for part in parts)
    together = replace(
        whole,
        weight=torch.cat([part.weight for part in parts]),
        keep=torch.cat([part.keep for part in parts]),
        statistics=merged,
    )
    same(together, whole)
    assert torch.equal(together.weight, whole.weight)


@examples
@given(corrections(), batches(min_rows=1))
def test_nothing_carries_a_gradient(correction: CorrectionSpec, rows: Rows) -> None:
    leaves = {name: getattr(rows, name).clone().requires_grad_() for name in ("mu", "old", "pi", "advantages")}
    step = decide(correction, replace(rows, **leaves))
    parts = [torch.as_tensor(part) for statistic in step.statistics.values() for part in statistic.parts]
    assert not any(tensor.requires_grad for tensor in [step.weight, *step.rejected.values(), *parts])


# Ratios, lengths, dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@settings(examples, max_examples=at_most(20))
@given(correction=corrections(), rows=batches())
def test_the_dtype_does_not_matter(dtype: torch.dtype, correction: CorrectionSpec, rows: Rows) -> None:
    """These log-probs are exact in each dtype, so any computation in a short dtype would show."""
    assert torch.equal(rows.mu.to(dtype).float(), rows.mu)
    step, single = decide(correction, rows.to(dtype)), decide(correction, rows)
    assert torch.equal(step.keep, single.keep)
    assert step.weight.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert torch.allclose(step.weight.float(), single.weight, rtol=1e-6, atol=0.0)
