"""A correction is validated once: what cannot be meant is refused with key, value and fix."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from corrections import GSM, TIS, band, opsm, spec

from recipe.offpolicy.correction import CorrectionSpec, MaskSpec, SpecError, WeightSpec

STACK: dict[str, Any] = {
    "weight": TIS,
    "masks": {"gsm": GSM, "opsm": opsm(0.1)},
    "allow_truncated_sampling": False,
}


def refused(mapping: Any, *parts: str) -> str:
    """The message of the refusal, which must hold each of the parts."""
    with pytest.raises(SpecError) as caught:
        CorrectionSpec.from_mapping(mapping)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


def weight(**changes: Any) -> dict[str, Any]:
    return {"weight": TIS | changes}


def mask(**changes: Any) -> dict[str, Any]:
    return {"masks": {"gsm": GSM | changes}}


def without(mapping: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


# What a spec holds ------------------------------------------------------------------------------------------


def test_the_vocabulary_of_the_specification() -> None:
    correction = CorrectionSpec.from_mapping(STACK)
    assert correction.weight == WeightSpec("token", "truncate", None, 2.0)
    assert dict(correction.masks) == {
        "gsm": MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any"),
        "opsm": MaskSpec("full", "sequence", "geometric", math.exp(-0.1), None, "negative", delta=0.1),
    }
    assert not correction.is_none


@pytest.mark.parametrize("nothing", [{}, {"weight": None}, {"masks": {}}, {"weight": None, "masks": None}])
def test_nothing_configured_is_none(nothing: dict[str, Any]) -> None:
    assert CorrectionSpec.from_mapping(nothing) == CorrectionSpec()
    assert CorrectionSpec.from_mapping(nothing).is_none


def test_consent_alone_corrects_nothing() -> None:
    assert CorrectionSpec.from_mapping({"allow_truncated_sampling": True}).is_none


def test_a_mask_waits_for_the_step_if_it_needs_pi_or_the_advantages() -> None:
    needs = {
        (ratio, when): MaskSpec.from_mapping(GSM | {"ratio": ratio, "when": when}, key="k").needs_step
        for ratio in ("rollout", "full", "ppo")
        for when in ("any", "negative", "positive")
    }
    assert [pair for pair, step in needs.items() if not step] == [("rollout", "any")]


def test_bounds_in_log_space() -> None:
    # log 0.99 = -0.0100503, log 1.01 = 0.0099503; delta = 0.1 stands for lower = exp(-0.1), kept as -0.1 exactly.
    lower, upper = MaskSpec.from_mapping(GSM, key="k").log_bounds
    assert lower == pytest.approx(-0.01005034, abs=1e-8)
    assert upper == pytest.approx(0.00995033, abs=1e-8)
    assert MaskSpec.from_mapping(opsm(0.1), key="k").log_bounds == (-0.1, math.inf)
    assert MaskSpec.from_mapping(band(None, 2.0), key="k").log_bounds == (-math.inf, math.log(2.0))


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        weight(),
        weight(level="sequence", upper=5.0),
        weight(kind="clip", lower=0.5),
        weight(lower=0.5, upper=None),
        weight(upper=None),
        mask(),
        mask(lower=None),
        mask(aggregate="product", ratio="ppo", when="positive"),
        {"masks": {"opsm": opsm(0.0)}},
        STACK,
        STACK | {"allow_truncated_sampling": True},
    ],
)
def test_to_mapping_is_plain_and_comes_back(mapping: dict[str, Any]) -> None:
    correction = CorrectionSpec.from_mapping(mapping)
    plain = json.loads(json.dumps(correction.to_mapping()))
    assert CorrectionSpec.from_mapping(plain) == correction
    assert CorrectionSpec.from_mapping(plain).fingerprint() == correction.fingerprint()


def test_delta_stays_delta() -> None:
    assert spec(opsm=opsm(0.1)).to_mapping()["masks"]["opsm"] == opsm(0.1)


# Fingerprint ------------------------------------------------------------------------------------------------


def test_fingerprints_are_the_same_in_every_release() -> None:
    """Literal values: a change here means that a worker and a trainer of two releases cannot agree."""
    assert CorrectionSpec().fingerprint() == 552446523
    assert spec(TIS).fingerprint() == 1236527604
    assert spec(gsm=GSM).fingerprint() == 1682593654


def test_fingerprint_differs_when_anything_does() -> None:
    variants = [
        {},
        {"allow_truncated_sampling": True},
        weight(),
        weight(upper=2.0000001),
        weight(upper=None),
        weight(lower=2.0, upper=None),
        weight(level="sequence"),
        weight(lower=0.5, kind="clip"),
        weight(lower=2.0, kind="clip"),
        mask(),
        {"masks": {"other": GSM}},
        mask(lower=None),
        mask(upper=None),
        mask(lower=0.98),
        mask(upper=1.02),
        mask(ratio="full"),
        mask(ratio="ppo"),
        mask(aggregate="product"),
        mask(when="negative"),
        mask(when="positive"),
        {"masks": {"gsm": GSM, "second": GSM}},
        {"masks": {"gsm": opsm(0.1)}},
        {"masks": {"gsm": opsm(0.2)}},
        {"masks": {"gsm": without(opsm(0.1), "delta") | {"lower": math.exp(-0.1), "upper": None}}},
        {**weight(), **mask()},
    ]
    fingerprints = [CorrectionSpec.from_mapping(variant).fingerprint() for variant in variants]
    assert len(set(fingerprints)) == len(variants)
    assert all(isinstance(value, int) and 0 <= value < 2**31 for value in fingerprints)


def test_equal_specs_have_equal_fingerprints() -> None:
    one = CorrectionSpec.from_mapping({"masks": {"a": GSM, "b": opsm(0.0)}, "weight": TIS | {"upper": 2}})
    two = CorrectionSpec.from_mapping({"weight": TIS, "masks": {"b": opsm(-0.0), "a": GSM}})
    assert one == two
    assert one.fingerprint() == two.fingerprint()


# Refusals ---------------------------------------------------------------------------------------------------


def test_null_says_how_to_train_uncorrected() -> None:
    refused(None, "correction=null", "correction=none")


@pytest.mark.parametrize(
    ("mapping", "key", "value"),
    [
        ({"weigth": TIS}, "correction.weigth", "truncate"),
        ({"x": 1}, "correction.x", "1"),
        (weight(cap=3.0), "correction.weight.cap", "3.0"),
        (weight(delta=3.0), "correction.weight.delta", "3.0"),
        (mask(uper=1.02), "correction.masks.gsm.uper", "1.02"),
        ({"masks": {"opsm": opsm(0.1, threshold=7)}}, "correction.masks.opsm.threshold", "7"),
    ],
)
def test_unknown_keys_at_every_level(mapping: dict[str, Any], key: str, value: str) -> None:
    message = refused(mapping, f"{key}=", value, "unknown key")
    assert "Known under" in message  # the fix: what may stand there


@pytest.mark.parametrize("key", ["level", "kind", "lower", "upper"])
def test_a_weight_leaves_nothing_out(key: str) -> None:
    refused({"weight": without(TIS, key)}, f"correction.weight.{key}", "not set", f"Set correction.weight.{key}=")


@pytest.mark.parametrize("key", ["ratio", "level", "aggregate", "when", "lower", "upper"])
def test_a_mask_leaves_nothing_out(key: str) -> None:
    path = f"correction.masks.gsm.{key}"
    message = refused({"masks": {"gsm": without(GSM, key)}}, path, "not set", f"Set {path}=")
    assert ("null leaves that side open" in message) == (key in {"lower", "upper"})


@pytest.mark.parametrize("key", ["ratio", "level", "aggregate", "when"])
def test_a_mask_with_delta_leaves_nothing_out(key: str) -> None:
    refused({"masks": {"opsm": without(opsm(0.1), key)}}, f"correction.masks.opsm.{key}", "not set")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "0.5", "0.5_2.0", "", True, False, [1.0], {}, 10**400])
@pytest.mark.parametrize("side", ["lower", "upper"])
def test_bounds_are_finite_numbers_or_null(side: str, bad: Any) -> None:
    other = {"lower": None, "upper": None} | {side: bad}
    refused({"weight": TIS | other}, f"correction.weight.{side}=", "expected a", "null")
    refused({"masks": {"gsm": GSM | other}}, f"correction.masks.gsm.{side}=", "expected a", "null")


@pytest.mark.parametrize("bad", [math.nan, math.inf, "0.1", True, [0.1]])
def test_delta_is_a_finite_number(bad: Any) -> None:
    refused({"masks": {"opsm": opsm(bad)}}, "correction.masks.opsm.delta=", "expected a")


@pytest.mark.parametrize("bad", [-0.1, -1e-12, None])
def test_delta_is_not_negative(bad: Any) -> None:
    refused({"masks": {"opsm": opsm(bad)}}, f"correction.masks.opsm.delta={bad}", ">= 0", "delta=0.1")


def test_a_delta_that_the_option_asks_for() -> None:
    """``delta: ???`` in the option reaches us as it stands."""
    refused(
        {"masks": {"opsm": opsm("???")}},  # type: ignore[arg-type]
        "correction.masks.opsm.delta",
        "required",
        "no published default",
        "Set correction.masks.opsm.delta=",
    )


@pytest.mark.parametrize("side", ["lower", "upper"])
def test_delta_stands_for_the_bounds(side: str) -> None:
    clash = opsm(0.1) | {side: 0.9}
    refused({"masks": {"opsm": clash}}, "opsm.delta=0.1", f"opsm.{side}=0.9", "either delta or the two bounds")


@pytest.mark.parametrize("bad", [0.0, -0.5])
@pytest.mark.parametrize("side", ["lower", "upper"])
def test_bounds_are_positive(side: str, bad: float) -> None:
    other = {"lower": None, "upper": None} | {side: bad}
    refused({"weight": TIS | other}, f"correction.weight.{side}={bad}", "Set a bound > 0, or null")
    refused({"masks": {"gsm": GSM | other}}, f"correction.masks.gsm.{side}={bad}", "Set a bound > 0, or null")


def test_bounds_that_cross() -> None:
    refused(weight(kind="clip", lower=2.0, upper=0.5), "weight.lower=2.0", "weight.upper=0.5", "Swap the bounds")
    refused(mask(lower=1.01, upper=0.99), "masks.gsm.lower=1.01", "masks.gsm.upper=0.99", "Swap the bounds")


def test_bounds_may_coincide() -> None:
    assert CorrectionSpec.from_mapping(mask(lower=1.0, upper=1.0)).masks[0][1].log_bounds == (0.0, 0.0)


@pytest.mark.parametrize("bad", [1e-9, 1e9, 1e39, 1e300])
def test_a_weight_bound_that_the_clamp_hides(bad: float) -> None:
    """exp(+-20) = 2.06e-9 and 4.85e8 are the least and greatest weights; a bound beyond would never act."""
    refused(weight(upper=bad), f"correction.weight.upper={bad}", "2.06e-09", "4.85e+08", "null")
    refused(weight(lower=bad, upper=None), f"correction.weight.lower={bad}", "null")


def test_truncate_binds_one_side_and_clip_two() -> None:
    refused(weight(lower=0.5), "correction.weight.lower=0.5", "correction.weight.upper=2.0", "kind=clip")
    refused(weight(kind="clip"), "correction.weight.kind=clip", "lower=None", "kind=truncate")
    refused(weight(kind="clip", lower=0.5, upper=None), "correction.weight.kind=clip", "upper=None")


def test_a_mask_with_both_sides_open() -> None:
    refused(mask(lower=None, upper=None), "gsm.lower=null", "gsm.upper=null", "Set a bound, or remove the mask")


@pytest.mark.parametrize(
    ("mapping", "key", "allowed"),
    [
        (weight(level="row"), "correction.weight.level='row'", "token, sequence"),
        (weight(level=None), "correction.weight.level=None", "token, sequence"),
        (weight(level=["token"]), "correction.weight.level=['token']", "token, sequence"),
        (weight(kind="trunc"), "correction.weight.kind='trunc'", "truncate, clip"),
        (mask(ratio="old"), "correction.masks.gsm.ratio='old'", "rollout, full, ppo"),
        (mask(aggregate="mean"), "correction.masks.gsm.aggregate='mean'", "geometric, product"),
        (mask(when="A<0"), "correction.masks.gsm.when='A<0'", "any, negative, positive"),
        (mask(when=True), "correction.masks.gsm.when=True", "any, negative, positive"),
        (mask(level="token"), "correction.masks.gsm.level='token'", "correction.masks.gsm.level=sequence"),
        (mask(level="turn"), "correction.masks.gsm.level='turn'", "token, sequence"),
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


def test_a_mask_that_is_null() -> None:
    refused({"masks": {"gsm": None}}, "correction.masks.gsm=null", "mapping")


@pytest.mark.parametrize("bad", ["yes", 1, 0, None, "true"])
def test_consent_is_a_truth_value(bad: Any) -> None:
    refused({"allow_truncated_sampling": bad}, "correction.allow_truncated_sampling=", repr(bad), "true or false")


@pytest.mark.parametrize("name", ["min", "gsm_max", "admin", "GSM", "1st", "a.b", "a/b", "a b", "", "_a", 1])
def test_mask_names_become_metrics(name: Any) -> None:
    """verl takes the minimum or maximum of metrics by substring of the name, so these would change a reduction."""
    refused({"masks": {name: GSM}}, f"correction.masks.{name}", "Rename the mask")
