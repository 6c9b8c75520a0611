"""Numbers at the edge: huge and missing log-probs, no rows, no tokens, rows of 32768 tokens, short dtypes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, turns
from tests.support import reference
from tests.support.corrections import M2PO, TIS, run, spec, values
from tests.support.drawn import AGGREGATES, LEVELS, Rows, bounds_of, decide

LONG = 32768


def bounds(aggregate: str) -> dict[str, float | None]:
    return bounds_of(aggregate, (0.5, 2.0), 0.5)


def everything(**changes: Any) -> CorrectionSpec:
    """A mask of every level and aggregate, on the three ratios in turn, next to M2PO and a normalised weight."""
    ratios = itertools.cycle(["rollout", "full", "ppo"])
    masks = {
        f"{level}_{aggregate}".replace("max", "peak"): dict(
            ratio=next(ratios), level=level, aggregate=aggregate, when="any", **bounds(aggregate)
        )
        for level, aggregate in itertools.product(LEVELS, AGGREGATES)
    }
    weight = TIS | {"level": "turn", "normalize": True} | changes
    return spec(weight, m2po=M2PO, **masks)


EVERYTHING = everything()


# Log-ratios -------------------------------------------------------------------------------------------------


def test_reject_looks_beyond_the_clamp() -> None:
    """A product of e^30 is a weight of e^20 at most, and outside of a bound of e^20 all the same."""
    weight = TIS | {"level": "sequence", "kind": "reject", "upper": math.exp(20.0)}
    assert not run(spec(weight), mu=torch.zeros(1, 30), old=torch.ones(1, 30)).keep.any()


# Little or nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_no_rows_or_no_columns(shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape)
    step = run(EVERYTHING, mu=empty, old=empty, mask=empty, turns=empty.long(), versions=empty.long(), advantages=empty)
    assert step.weight.shape == step.keep.shape == shape
    assert all(not value or math.isnan(value) for value in values(step).values())


# Dtypes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("level", LEVELS)
def test_short_dtypes_are_widened_before_anything_is_computed(level: str, dtype: torch.dtype) -> None:
    """Against a float64 reference that starts from the same numbers, rounded as they arrive."""
    generator = torch.Generator().manual_seed(2)
    shape = (8, 40)
    mu = (-2.0 * torch.rand(shape, generator=generator)).to(dtype)
    old, pi = ((mu.double() + 0.1 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(2))
    mask = torch.rand(shape, generator=generator) < 0.8
    rows = Rows(
        mu, old, pi, mask, torch.randn(shape, generator=generator), turns(mask), torch.arange(40).expand(shape) // 13
    )
    weight = TIS | {"level": level, "upper": 1.5}
    correction = CorrectionSpec.from_mapping(
        {
            "weight": weight,
            "masks": {
                "k3": dict(ratio="full", level=level, aggregate="k3_mean", lower=None, upper=0.0123, when="negative"),
                "geo": dict(
                    ratio="rollout", level=level, aggregate="geometric", lower=0.9813, upper=1.0213, when="any"
                ),
            },
        }
    )
    want, step = reference.expected(correction.to_mapping(), rows.lists), decide(correction, rows)
    assert want.margin > 2e-7
    assert step.keep.tolist() == want.keep
    assert 0 < step.keep.sum() < mask.sum()
    assert step.weight.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert step.weight.flatten().tolist() == pytest.approx([w for row in want.weight for w in row], rel=1e-5, abs=0.0)


# Rows of 32768 tokens ---------------------------------------------------------------------------------------


def long_rows(size: float, *, rows: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    mu = -2.0 * torch.rand(rows, LONG, generator=generator) - 0.05
    return mu, (mu + size * torch.randn(rows, LONG, generator=generator)).clamp(max=0.0)


def reference_statistics(log_rho: list[float]) -> dict[str, float]:
    n, rho = len(log_rho), [math.exp(x) for x in log_rho]
    mean = math.fsum(rho) / n
    return {
        "rollout_ratio/mean": mean,
        "rollout_ratio/std": math.sqrt(math.fsum((r - mean) ** 2 for r in rho) / n),
        "rollout_ratio/min": min(rho),
        "rollout_ratio/max": max(rho),
        "rollout_ratio/ess": math.fsum(rho) ** 2 / (n * math.fsum(r * r for r in rho)),
        "log_prob_difference/abs_mean": math.fsum(map(abs, log_rho)) / n,
        "kl/k3": math.fsum(math.expm1(x) - x for x in log_rho) / n,
    }


@pytest.mark.parametrize("size", [1e-4, 0.003, 0.1, 1.0])
def test_statistics_of_long_rows_keep_five_digits(size: float) -> None:
    """From float32 log-probs, for k3 of ratios 1 +- 1e-4 (5e-9) and the deviation of weights near 1 as well."""
    mu, old = long_rows(size)
    found = values(run(spec(), mu=mu, old=old))
    exact = (old.double() - mu.double()).flatten().tolist()
    for name, value in reference_statistics(exact).items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    # One minus the effective sample size is what is looked at; it is the squared deviation over the squared mean.
    assert found["weight/ess"] == 1.0
