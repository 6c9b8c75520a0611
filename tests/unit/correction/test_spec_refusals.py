"""What cannot be meant is refused with key, value and fix: keys, numbers and words."""

from __future__ import annotations

import math
from typing import Any

import pytest

from recipe.offpolicy.correction.problem import format_value
from tests.support.corrections import GSM, M2PO, TIS, opsm
from tests.support.refusals import mask, refused, weight, without

# Refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "key", "value"),
    [
        ({"weigth": TIS}, "correction.weigth", "truncate"),
        ({"x": 1}, "correction.x", "1"),
        ({7: "seven"}, "correction.7", "seven"),
        (weight(cap=3.0), "correction.weight.cap", "3.0"),
        (weight(delta=3.0), "correction.weight.delta", "3.0"),
        (mask(uper=1.02), "correction.masks.gsm.uper", "1.02"),
        ({"masks": {"opsm": opsm(0.1, threshold=7)}}, "correction.masks.opsm.threshold", "7"),
    ],
)
def test_unknown_keys_at_every_level(mapping: dict[str, Any], key: str, value: str) -> None:
    message = refused(mapping, f"{key}=", value, "unknown key")
    assert "Known under" in message or "Did you mean" in message  # the fix: what may stand there


BOTH = {"weight": TIS, "masks": {"gsm": GSM}}
NAMED = {"masks": {"gsm": GSM, "opsm": opsm(0.1)}}


@pytest.mark.parametrize(
    ("mapping", "key", "meant"),
    [
        ({"masks": {"gsm": GSM, "upper": 1.02}}, "masks.upper", "masks.gsm.upper"),
        (BOTH | {"gsm": {"upper": 1.02}}, "gsm", "masks.gsm.upper"),
        (BOTH | {"upper": 1.02}, "upper", "weight.upper or correction.masks.gsm.upper"),
        (BOTH | {"weights": {"upper": 2}}, "weights.upper", "weight.upper"),
        ({"weight": TIS, "weights": {"upper": 2}}, "weights.upper", "weight.upper"),
        ({"weight": TIS, "tis_token": {"upper": 2}}, "tis_token", "weight.upper"),
        (NAMED | {"opsm": {"delta": 0.2}}, "opsm", "masks.opsm.delta"),
        ({"masks": {**NAMED["masks"], "delta": 0.2}}, "masks.delta", "masks.opsm.delta"),
    ],
)
def test_a_key_outside_its_part_names_the_part(mapping: dict[str, Any], key: str, meant: str) -> None:
    refused(mapping, f"correction.{key}=", f"Did you mean correction.{meant}?")


@pytest.mark.parametrize("key", ["ratio", "level", "aggregate", "when", "lower", "upper"])
def test_a_mask_leaves_nothing_out(key: str) -> None:
    path = f"correction.masks.gsm.{key}"
    message = refused({"masks": {"gsm": without(GSM, key)}}, path, "not set", f"Set {path}=")
    assert ("null leaves that side open" in message) == (key in {"lower", "upper"})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "0.5", "0.5_2.0", "", True, False, [1.0], {}, 10**400])
@pytest.mark.parametrize("side", ["lower", "upper"])
def test_bounds_are_finite_numbers_or_null(side: str, bad: Any) -> None:
    other = {"lower": None, "upper": None} | {side: bad}
    refused({"weight": TIS | other}, f"correction.weight.{side}=", "expected a", "null")
    refused({"masks": {"gsm": GSM | other}}, f"correction.masks.gsm.{side}=", "expected a", "null")


@pytest.mark.parametrize("bad", [-0.1, -1e-12, None])
def test_delta_is_not_negative(bad: Any) -> None:
    refused({"masks": {"opsm": opsm(bad)}}, f"correction.masks.opsm.delta={format_value(bad)}", ">= 0", "delta=0.1")


def test_a_delta_that_the_option_asks_for() -> None:
    """``delta: ???`` in the option reaches us as it stands."""
    refused(
        {"masks": {"opsm": opsm("???")}},  # type: ignore[arg-type]
        "correction.masks.opsm.delta",
        "required",
        "no published default",
        "Set correction.masks.opsm.delta=",
    )


@pytest.mark.parametrize("bad", [0.0, -0.5])
@pytest.mark.parametrize("side", ["lower", "upper"])
def test_bounds_are_positive(side: str, bad: float) -> None:
    other = {"lower": None, "upper": None} | {side: bad}
    refused({"weight": TIS | other}, f"correction.weight.{side}={bad}", "Set a bound > 0, or null")
    refused({"masks": {"gsm": GSM | other}}, f"correction.masks.gsm.{side}={bad}", "Set a bound > 0, or null")


@pytest.mark.parametrize("bad", [1e-9, 1e9, 1e39, 1e300])
def test_a_weight_bound_that_the_clamp_hides(bad: float) -> None:
    """exp(+-20) = 2.06e-9 and 4.85e8 are the least and greatest weights; a bound beyond would never act."""
    refused(weight(upper=bad), f"correction.weight.upper={bad}", "2.06e-09", "4.85e+08", "null")
    refused(weight(lower=bad, upper=None), f"correction.weight.lower={bad}", "null")


def test_truncate_binds_one_side_and_clip_two() -> None:
    refused(weight(lower=0.5), "correction.weight.lower=0.5", "correction.weight.upper=2.0", "kind=clip")
    refused(weight(kind="clip"), "correction.weight.kind=clip", "lower=null", "kind=truncate")
    refused(weight(kind="clip", lower=0.5, upper=None), "correction.weight.kind=clip", "upper=null")


def test_a_mask_with_both_sides_open() -> None:
    refused(mask(lower=None, upper=None), "gsm.lower=null", "gsm.upper=null", "Set a bound, or remove the mask")


@pytest.mark.parametrize(
    ("mapping", "key", "allowed"),
    [
        (weight(level="row"), "correction.weight.level=row", "token, sequence"),
        (weight(level=None), "correction.weight.level=null", "token, sequence"),
        (weight(level=["token"]), "correction.weight.level=[token]", "token, sequence"),
        (weight(kind="trunc"), "correction.weight.kind=trunc", "truncate, clip, reject"),
        (mask(ratio="old"), "correction.masks.gsm.ratio=old", "rollout, full, ppo"),
        (weight(level="response"), "correction.weight.level=response", "token, sequence, turn, version"),
        (weight(aggregate="mean"), "correction.weight.aggregate=mean", "product, geometric"),
        (weight(aggregate=None), "correction.weight.aggregate=null", "product, geometric"),
        (weight(ratio="ppo"), "correction.weight.ratio=ppo", "rollout, full"),
        (mask(aggregate="mean"), "correction.masks.gsm.aggregate=mean", "product, geometric, any, k1_sum"),
        (mask(aggregate="k4_sum"), "correction.masks.gsm.aggregate=k4_sum", "binary_tv, binary_tv_mean"),
        (mask(sign="group"), "correction.masks.gsm.sign=group", "row, token"),
        (mask(sign=None), "correction.masks.gsm.sign=null", "row, token"),
        ({"proximal": "none"}, "correction.proximal=none", "recompute, bypass, reuse, loglinear"),
        ({"proximal": None}, "correction.proximal=null", "recompute, bypass, reuse, loglinear"),
        ({"denominator": "masked"}, "correction.denominator=masked", "original, kept"),
        ({"baseline": "drop"}, "correction.baseline=drop", "include, exclude"),
        (mask(when="A<0"), "correction.masks.gsm.when=A<0", "any, negative, positive"),
        (mask(when=True), "correction.masks.gsm.when=true", "any, negative, positive"),
        (mask(level="response"), "correction.masks.gsm.level=response", "token, sequence, turn, version"),
    ],
)
def test_words_are_of_the_vocabulary(mapping: dict[str, Any], key: str, allowed: str) -> None:
    refused(mapping, key, allowed)


@pytest.mark.parametrize("bad", ["gsm", 3, [GSM], True])
def test_what_must_be_a_mapping(bad: Any) -> None:
    refused(bad, "correction=", "mapping")
    refused({"weight": bad}, "correction.weight=", "mapping")
    refused({"masks": bad}, "correction.masks=", "mapping")
    refused({"masks": {"gsm": bad}}, "correction.masks.gsm=", "mapping")


@pytest.mark.parametrize("bad", ["yes", 1, 0, None, "true", "???"])
def test_truth_values(bad: Any) -> None:
    for key in ("allow_truncated_sampling", "skyrl_compat"):
        refused({key: bad}, f"correction.{key}={format_value(bad)}", "true or false")
    refused(weight(normalize=bad), "correction.weight.normalize", format_value(bad) if bad != "???" else "required")


@pytest.mark.parametrize("name", ["min", "gsm_max", "admin", "GSM", "1st", "a.b", "a/b", "a b", "", "_a", 1])
def test_mask_names_become_metrics(name: Any) -> None:
    """verl takes the minimum or maximum of metrics by substring of the name, so these would change a reduction."""
    refused({"masks": {name: GSM}}, f"correction.masks.{name}", "Rename the mask")


# Values that are mandatory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "key"),
    [
        (weight(upper="???"), "correction.weight.upper"),
        (weight(level="???"), "correction.weight.level"),
        (weight(ratio="???"), "correction.weight.ratio"),
        (mask(lower="???"), "correction.masks.gsm.lower"),
        (mask(sign="???"), "correction.masks.gsm.sign"),
        ({"masks": {"m": M2PO | {"budget": "???"}}}, "correction.masks.m.budget"),
        ({"kl_clip": {"lower": "???", "upper": 1.2}}, "correction.kl_clip.lower"),
    ],
)
def test_a_value_that_the_option_asks_for(mapping: dict[str, Any], key: str) -> None:
    refused(mapping, f"{key}=???: required and not set", f"Set {key}=")
