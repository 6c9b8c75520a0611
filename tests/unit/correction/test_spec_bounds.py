"""Bounds that an aggregate or a kind of weight cannot have are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.problem import format_value
from tests.support.corrections import M2PO, opsm, spec
from tests.support.refusals import mask, refused, weight, without

# Masks: bounds of each aggregate ----------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["k2_sum", "k2_mean", "k3_max", "k3_sum", "tv_mean", "tv_max"])
@pytest.mark.parametrize("side", ["lower", "upper"])
def test_bounds_of_what_is_never_negative(aggregate: str, side: str) -> None:
    bounds = {"lower": None, "upper": None} | {side: -0.1}
    refused(mask(aggregate=aggregate, **bounds), f"masks.gsm.{side}=-0.1", "never negative", "Set a bound >= 0")


@pytest.mark.parametrize("side", ["lower", "upper"])
def test_bounds_of_a_difference_of_probabilities(side: str) -> None:
    bounds = {"lower": None, "upper": None} | {side: -1.1 if side == "lower" else 1.1}
    refused(mask(aggregate="binary_tv", **bounds), f"masks.gsm.{side}=", "[-1, 1]", f"Set correction.masks.gsm.{side}=")


@pytest.mark.parametrize(
    ("aggregate", "lower", "upper"),
    [
        ("k2_mean", 0.0, None),
        ("k3_max", 0.0, None),
        ("tv_sum", 0.0, None),
        ("binary_tv", -1.0, None),
        ("binary_tv", None, 1.0),
        ("binary_tv", -1.0, 1.0),
    ],
)
def test_bounds_that_hold_everything(aggregate: str, lower: float | None, upper: float | None) -> None:
    refused(
        mask(aggregate=aggregate, lower=lower, upper=upper),
        f"masks.gsm.lower={format_value(lower)}",
        "never acts",
        "Set",
    )


@pytest.mark.parametrize("side", ["lower", "upper"])
@pytest.mark.parametrize("aggregate", ["product", "geometric"])
def test_a_half_set_band_on_tokens(aggregate: str, side: str) -> None:
    half = mask(level="token", aggregate=aggregate, **{side: None})
    refused(half, f"masks.gsm.{side}=null", f"Set correction.masks.gsm.{side}", "correction.masks.gsm.aggregate=any")
    for allowed in ({"aggregate": "any"}, {"when": "negative"}, {"aggregate": "k1_mean"}, {"level": "turn"}):
        half["masks"]["gsm"] = (
            half["masks"]["gsm"] | {"level": "token", "aggregate": aggregate, "when": "any"} | allowed
        )
        assert CorrectionSpec.from_mapping(half)


@pytest.mark.parametrize("aggregate", ["any", "k1_sum", "k1_mean", "k3_mean", "tv_max", "binary_tv"])
def test_delta_is_of_a_mean_or_sum_of_log_ratios(aggregate: str) -> None:
    refused(
        {"masks": {"opsm": opsm(0.1, aggregate=aggregate)}},
        "masks.opsm.delta=0.1",
        f"masks.opsm.aggregate={aggregate}",
        "Set correction.masks.opsm.aggregate=geometric",
    )


def test_a_delta_that_no_mean_reaches() -> None:
    """20 nats a token, which is where ratios are clamped; a sum over many tokens may well exceed it."""
    refused({"masks": {"opsm": opsm(20.5)}}, "masks.opsm.delta=20.5", "never acts", "Set correction.masks.opsm.delta=")
    assert spec(opsm=opsm(20.5, aggregate="product")).masks[0][1].limits == (-20.5, math.inf)


@pytest.mark.parametrize("bad", [0.0, -0.1, None])
def test_a_budget_is_positive(bad: Any) -> None:
    refused(
        {"masks": {"m": M2PO | {"budget": bad}}},
        f"masks.m.budget={format_value(bad)}",
        "> 0",
        "Set correction.masks.m.budget=",
    )


def test_a_budget_is_of_second_moment_alone() -> None:
    clash = M2PO | {"aggregate": "geometric"}
    refused({"masks": {"m": clash}}, "masks.m.aggregate=geometric", "budget", "Set correction.masks.m.aggregate=")
    bounded = without(M2PO, "budget") | {"lower": None, "upper": 0.04}
    refused({"masks": {"m": bounded}}, "masks.m.aggregate=second_moment", "m.lower=null", "m.upper=0.04", "budget")
    refused(
        {"masks": {"m": opsm(0.1, aggregate="second_moment")}}, "masks.m.aggregate=second_moment", "delta", "budget"
    )


@pytest.mark.parametrize("key", ["lower", "upper", "delta"])
def test_a_budget_stands_alone(key: str) -> None:
    refused({"masks": {"m": M2PO | {key: 0.5}}}, "masks.m.", "=0.04", f"{key}=0.5", "Give delta, or budget, or")


@pytest.mark.parametrize(
    "change",
    [{"level": "sequence"}, {"level": "turn"}, {"ratio": "full"}, {"ratio": "ppo"}, {"when": "negative"}],
)
def test_a_budget_is_of_tokens_by_the_rollout_ratio(change: dict[str, str]) -> None:
    ((key, value),) = change.items()
    refused({"masks": {"m": M2PO | change}}, "masks.m.aggregate=second_moment", f"{key}={value}", f"masks.m.{key}=")


# Prefixes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.0, 1.5, -2.0])
def test_a_power_of_the_position_is_small(power: float) -> None:
    refused(weight(level="prefix", by_position=power), f"weight.by_position={power}", "[-1, 1]", "by_position=0.5")


def test_what_a_prefix_alone_has() -> None:
    refused(weight(by_position=0.5), "weight.by_position=0.5", "correction.weight.level=prefix")
    refused(weight(aggregate="minimum"), "weight.aggregate=minimum", "correction.weight.level=prefix")
    refused(weight(level="prefix", upper=None, by_position=0.5), "no bound", "correction.weight.by_position=null")
    refused(weight(level="prefix", by_staleness=[1.0, 2.0]), "weight.level=prefix", "weight.by_staleness=null")
    mask_by_position = mask(level="prefix", aggregate="k3_mean", lower=None, upper=0.1, by_position=0.5)
    refused(mask_by_position, "by_position=0.5", "no log to multiply")
    wide = mask(level="prefix", aggregate="binary_tv_sum", lower=None, upper=2.0)
    refused(wide, "upper=2.0", "first token", "level=sequence")


# Weights ----------------------------------------------------------------------------------------------------


def test_reject_needs_a_bound() -> None:
    refused(weight(kind="reject", upper=None), "weight.kind=reject", "lower=null", "correction.weight.kind=truncate")


def test_the_mean_of_a_weight_that_moves_with_pi() -> None:
    refused(
        weight(ratio="full", normalize=True),
        "correction.weight.normalize=true",
        "correction.weight.ratio=full",
        "Set correction.weight.normalize=false",
    )


def test_a_gamma_has_two_numbers_and_no_bounds() -> None:
    gamma = {"kind": "gamma", "power": 2.0, "rate": 3.0}
    refused({"weight": {"level": "sequence", **gamma, "upper": 2.0}}, "weight.upper=2.0", "no bounds", "upper=null")
    refused(
        {"weight": {"level": "sequence", **gamma, "rate": 0.0}}, "weight.rate=0.0", "> 0", "correction.weight.rate=2.0"
    )
    refused({"weight": {"level": "sequence", "kind": "gamma", "power": 2.0}}, "weight.rate", "not set")
    refused(weight(power=2.0), "weight.power=2.0", "unknown key")
    spec_of = CorrectionSpec.from_mapping({"weight": {"level": "sequence", **gamma}})
    assert CorrectionSpec.from_mapping(spec_of.to_mapping()) == spec_of
