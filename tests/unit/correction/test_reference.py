"""Every word of the vocabulary, compared with an independent implementation: float64, lists, one token at a time."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis.strategies import integers

from recipe.offpolicy.correction import CorrectionSpec, turns
from recipe.offpolicy.correction.masks import AGGREGATES as ENTRIES
from recipe.offpolicy.correction.masks import Ratio
from recipe.offpolicy.correction.units import Level, MaskWhen, Sign
from recipe.offpolicy.correction.weights import Kind
from tests.support import reference
from tests.support.drawn import (
    AGGREGATES,
    LEVELS,
    RATIOS,
    Rows,
    batches,
    corrections,
    decide,
    examples,
    skyrl_corrections,
)
from tests.support.examples import at_most, each_nth_by_default

CLEAR = 2e-6  # float32 log-probs are good to that; what is closer to a bound may go either way
BY_ADVANTAGE = [("any", "row"), *itertools.product(("negative", "positive", "outward"), ("row", "token"))]
SIGNS = [*BY_ADVANTAGE, ("post_tool", "row")]


def rough(seed: int, rows: int = 24, tokens: int = 10, drift: float = 0.15) -> Rows:
    """Multi-turn rows with full float32 noise: holes of tool tokens, empty rows, a row of one token, and
    mixed signs.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(size: float) -> torch.Tensor:
        return size * torch.randn(rows, tokens, generator=generator)

    mu = -0.2 - normal(1.5).abs()
    old = torch.minimum(mu + normal(drift), torch.tensor(0.0))
    mask = torch.rand(rows, tokens, generator=generator) < 0.75
    mask[0], mask[1], mask[2] = False, torch.arange(tokens) == 3, True
    versions = torch.sort(torch.randint(17, 20, (rows, tokens), generator=generator), dim=-1).values
    return Rows(
        mu,
        old,
        torch.minimum(old + normal(drift), torch.tensor(0.0)),
        mask,
        advantages=normal(1.0) + torch.linspace(-1.0, 1.0, rows)[:, None],
        turns=turns(mask),
        versions=versions,
    )


BATCHES = [rough(1), rough(2, rows=5, tokens=16)]


def agree(correction: CorrectionSpec, rows: Rows, *, parts: bool = True, tolerance: float = 1e-6) -> reference.Expected:
    """Compare keep and each part's decision exactly, and the weight with a relative tolerance."""
    want, step = reference.expected(correction.to_mapping(), rows.lists), decide(correction, rows, measure="nothing")
    assert want.margin > CLEAR, "choose bounds clear of the data"
    assert step.keep.tolist() == want.keep
    weights = torch.tensor([w for row in want.weight for w in row], dtype=torch.float64)
    torch.testing.assert_close(step.weight.flatten().double(), weights, rtol=tolerance, atol=0.0)
    if parts:
        counted = reference.tokens_that_count(rows.lists, correction.to_mapping())
        assert step.rejected.keys() == want.rejected.keys()
        for key, drop in step.rejected.items():
            found = drop.tolist()
            assert {(b, t) for b, t in counted if found[b][t]} == want.rejected[key], key
    return want


def test_nothing_of_the_vocabulary_is_left_out() -> None:
    assert set(get_args(Level)) == set(LEVELS)
    assert set(get_args(Ratio)) == set(RATIOS)
    assert set(ENTRIES) == {*AGGREGATES, "second_moment", "staleness"}
    assert set(itertools.product(get_args(MaskWhen), get_args(Sign))) == {
        *SIGNS,
        *(("any", "token"), ("post_tool", "token")),  # which are refused
    }
    assert set(get_args(Kind)) == {"gamma", *(kind for kind, *_ in WEIGHT_BOUNDS)}


def between(values: list[float], share: float) -> float:
    """Return the midpoint of the widest gap around the quantile, so that no value is close to it."""
    values = sorted(set(values))
    middle = int(share * len(values))
    gaps = range(max(middle - 2, 1), min(middle + 3, len(values)))
    at = max(gaps, key=lambda i: values[i] - values[i - 1])
    return (values[at] + values[at - 1]) / 2


def extremes(mask: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the least and the greatest value of each unit; they are equal if a unit has one value."""
    found = [
        reference.statistics(mask, rows.lists, unit)
        for rows in BATCHES
        for unit in reference.units(mask["level"], rows.lists, reference.tokens_that_count(rows.lists))
    ]
    return [min(values) for values in found], [max(values) for values in found]


@pytest.mark.parametrize(
    ("level", "aggregate", "ratio"), each_nth_by_default(7, itertools.product(LEVELS, AGGREGATES, RATIOS))
)
def test_every_mask(level: str, aggregate: str, ratio: str) -> None:
    base: dict[str, Any] = dict(ratio=ratio, level=level, aggregate=aggregate, when="any", sign="row")
    least, greatest = extremes(base)
    low, high = between(least, 0.35), between(greatest, 0.65)
    delta = max(-low, 0.01)
    entry = ENTRIES[aggregate]
    if entry.on_ratio:
        low, high = math.exp(low), math.exp(high)
    masks = {
        f"{side}_{when}_{sign}": base | {"when": when, "sign": sign, "lower": lower, "upper": upper}
        for side, lower, upper in (("both", low, high), ("below", low, None), ("above", None, high))
        for when, sign in (BY_ADVANTAGE if level == "prefix" else SIGNS)
        if not (lower is not None and entry.reduce == "each" and entry.one_sided)
        if not (None in (lower, upper) and level == "token" and entry.of_log_ratios and when == "any")
    }
    if entry.of_log_ratios:
        for when, sign in BY_ADVANTAGE if level == "prefix" else SIGNS:
            masks[f"delta_{when}_{sign}"] = base | {"when": when, "sign": sign, "delta": delta}
    correction = CorrectionSpec.from_mapping({"masks": masks})
    dropped: dict[str, int] = dict.fromkeys(correction.to_mapping()["masks"], 0)
    for rows in BATCHES:
        for key, tokens in agree(correction, rows).rejected.items():
            dropped[key.removeprefix("masks.")] += len(tokens)
    total = sum(len(reference.tokens_that_count(rows.lists)) for rows in BATCHES)
    assert all(0 < count < total for count in dropped.values()), dropped


GAMMA = dict(kind="gamma", power=2.0, rate=3.0)
WEIGHT_BOUNDS = [
    ("truncate", None, None),
    ("truncate", None, 1.15),
    ("truncate", 0.87, None),
    ("clip", 0.87, 1.15),
    ("reject", 0.87, 1.15),
    ("reject", None, 1.15),
    ("reject", 0.87, None),
]


@pytest.mark.parametrize(
    ("level", "aggregate"), [*itertools.product(LEVELS, ["product", "geometric"]), ("prefix", "minimum")]
)
@pytest.mark.parametrize(("ratio", "normalize"), [("rollout", False), ("rollout", True), ("full", False)])
def test_every_weight(level: str, aggregate: str, ratio: str, normalize: bool) -> None:
    for bounds in [dict(kind=kind, lower=low, upper=high) for kind, low, high in WEIGHT_BOUNDS] + [GAMMA]:
        weight = dict(level=level, aggregate=aggregate) | bounds
        correction = CorrectionSpec.from_mapping({"weight": weight | {"ratio": ratio, "normalize": normalize}})
        for rows in BATCHES:
            agree(correction, rows)


@pytest.mark.parametrize("budget", [1e-6, 0.001, 0.005, 0.01, 0.015, 1.0])
def test_every_budget(budget: float) -> None:
    mask = dict(ratio="rollout", level="token", aggregate="second_moment", budget=budget, when="any")
    for rows in BATCHES:
        want = agree(CorrectionSpec.from_mapping({"masks": {"m": mask}}), rows)
        share = len(want.rejected["masks.m"]) / len(reference.tokens_that_count(rows.lists))
        assert share == 0.0 if budget == 1.0 else share > 0.0


@pytest.mark.parametrize("level", LEVELS)
def test_every_age(level: str) -> None:
    """Units of the drawn rows are 1 to 3 versions old; units without a token have no age."""
    base: dict[str, Any] = dict(aggregate="staleness", level=level)
    masks = {
        f"{when}_{sign}_{upper}": base | dict(when=when, sign=sign, upper=upper)
        for when, sign in BY_ADVANTAGE
        if when != "outward"
        for upper in (1, 2, 3)
    }
    for rows in BATCHES:
        dropped = agree(CorrectionSpec.from_mapping({"masks": masks}), rows).rejected
        assert {key for key, tokens in dropped.items() if tokens} == {f"masks.{key}" for key in masks if key[-1] != "3"}


@pytest.mark.parametrize(
    ("level", "scale"),
    [
        *itertools.product(LEVELS[:-1], [{"by_staleness": [1.0, 2.0]}, {"by_staleness": [0.25, 1.0, 0.5, 2.0]}]),
        *(("prefix", {"by_position": power}) for power in (0.5, -0.5, 1.0)),
    ],
)
def test_bounds_by_age_and_by_position(level: str, scale: dict[str, Any]) -> None:
    common = dict(level=level) | scale
    on_ratio = common | dict(ratio="rollout", when="any", lower=0.86, upper=1.17)
    masks = {aggregate: on_ratio | {"aggregate": aggregate} for aggregate in ("product", "geometric", "any")}
    masks["opsm"] = common | dict(ratio="full", aggregate="geometric", delta=0.11, when="negative")
    for kind, lower, upper in WEIGHT_BOUNDS[1:]:
        weight = common | dict(kind=kind, lower=lower, upper=upper, normalize=True)
        for rows in BATCHES:
            agree(CorrectionSpec.from_mapping({"weight": weight, "masks": masks}), rows)


@settings(examples, max_examples=at_most(400))
@given(corrections(by_age=True), batches(), integers(reference.IN_FORCE - 3, reference.IN_FORCE))
def test_any_correction_on_any_batch(correction: CorrectionSpec, rows: Rows, oldest: int) -> None:
    rows = replace(rows, versions=rows.versions + oldest)
    want = reference.expected(correction.to_mapping(), rows.lists)
    assume(want.margin > CLEAR)
    agree(correction, rows)


@settings(examples, max_examples=at_most(200))
@given(skyrl_corrections(), batches())
def test_the_order_of_skyrl(correction: CorrectionSpec, rows: Rows) -> None:
    want = reference.expected(correction.to_mapping(), rows.lists)
    assume(want.margin > CLEAR)
    agree(correction, rows, parts=False)
