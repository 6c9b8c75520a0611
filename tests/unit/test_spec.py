"""A correction is validated once: what cannot be meant is refused with key, value and fix."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from corrections import GSM, M2PO, TIS, band, opsm, spec

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


def test_limits_of_ratios_are_in_log_space() -> None:
    # log 0.99 = -0.0100503, log 1.01 = 0.0099503; delta = 0.1 stands for lower = exp(-0.1), kept as -0.1 exactly.
    lower, upper = MaskSpec.from_mapping(GSM, key="k").limits
    assert lower == pytest.approx(-0.01005034, abs=1e-8)
    assert upper == pytest.approx(0.00995033, abs=1e-8)
    assert MaskSpec.from_mapping(opsm(0.1), key="k").limits == (-0.1, math.inf)
    assert MaskSpec.from_mapping(band(None, 2.0), key="k").limits == (-math.inf, math.log(2.0))


def test_limits_of_differences_are_as_given() -> None:
    for aggregate in ("k1_sum", "k2_mean", "k3_max", "tv_mean", "binary_tv"):
        assert MaskSpec.from_mapping(band(0.1, 0.2, aggregate=aggregate), key="k").limits == (0.1, 0.2)
    assert MaskSpec.from_mapping(band(-0.3, None, aggregate="k1_mean"), key="k").limits == (-0.3, math.inf)
    assert MaskSpec.from_mapping(M2PO, key="k").limits == (-math.inf, math.inf)


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        weight(),
        weight(level="turn", aggregate="geometric"),
        weight(level="version", kind="reject", lower=0.5),
        weight(kind="reject", normalize=True),
        weight(ratio="full"),
        mask(level="token", lower=0.5, upper=2.0),
        mask(level="version", aggregate="any", lower=None),
        mask(level="turn", aggregate="k3_mean", lower=None, upper=0.001),
        mask(level="token", aggregate="binary_tv", lower=-0.2, upper=None, when="negative", sign="token"),
        {"masks": {"m": M2PO}},
        {"masks": {"m": opsm(30.0, aggregate="product", level="turn", sign="token")}},
        {"proximal": "bypass"},
        {"proximal": "reuse", "weight": TIS},
        {"proximal": "loglinear", "alpha": 0.25},
        {"denominator": "kept", **mask()},
        {"baseline": "exclude", **mask()},
        {"kl_clip": {"lower": 0.8, "upper": 1.3}},
        {"skyrl_compat": True, **mask(), **weight()},
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
    assert spec(opsm=opsm(0.1)).to_mapping()["masks"]["opsm"] == opsm(0.1) | {"sign": "row"}


def test_a_budget_stays_a_budget() -> None:
    assert spec(m=M2PO).to_mapping()["masks"]["m"] == M2PO | {"sign": "row"}


def test_defaults() -> None:
    assert CorrectionSpec().to_mapping() == {
        "weight": None,
        "masks": {},
        "proximal": "recompute",
        "alpha": None,
        "denominator": "original",
        "baseline": "include",
        "kl_clip": None,
        "skyrl_compat": False,
        "allow_truncated_sampling": False,
    }
    assert spec(TIS).to_mapping()["weight"] == TIS | {"aggregate": "product", "ratio": "rollout", "normalize": False}


def test_what_is_not_none() -> None:
    """Each of these changes a loss although there is neither a weight nor a mask."""
    for mapping in (
        {"proximal": "bypass"},
        {"proximal": "reuse"},
        {"proximal": "loglinear", "alpha": 0.5},
        {"kl_clip": {"lower": 0.8, "upper": 1.2}},
    ):
        assert not CorrectionSpec.from_mapping(mapping).is_none


def test_levels_are_those_in_use() -> None:
    assert CorrectionSpec().levels == frozenset()
    assert spec(TIS, a=GSM, b=band(0.9, 1.1, level="turn")).levels == {"token", "sequence", "turn"}


def test_what_needs_the_whole_batch() -> None:
    def needs(**mapping: Any) -> tuple[bool, bool]:
        correction = CorrectionSpec.from_mapping(mapping)
        return correction.needs_constants, correction.needs_batch

    assert needs(weight=TIS, masks={"gsm": GSM}) == (False, False)
    assert needs(weight=TIS | {"normalize": True}) == (True, True)
    assert needs(masks={"m": M2PO}) == (True, True)
    assert needs(denominator="kept", masks={"gsm": GSM}) == (False, True)
    assert needs(baseline="exclude", masks={"gsm": GSM}) == (False, True)


def test_which_parts_wait_for_the_step_and_which_reject_before() -> None:
    reject = TIS | {"kind": "reject"}
    assert spec(TIS, gsm=GSM, opsm=opsm(0.1)).step_parts == ("masks.opsm",)
    assert spec(TIS, gsm=GSM, opsm=opsm(0.1)).rollout_rejects == ("masks.gsm",)
    assert spec(reject, gsm=GSM).rollout_rejects == ("weight", "masks.gsm")
    assert spec(reject | {"ratio": "full"}, gsm=GSM).step_parts == ("weight",)
    assert spec(reject | {"ratio": "full"}, gsm=GSM).rollout_rejects == ("masks.gsm",)


# Fingerprint ------------------------------------------------------------------------------------------------


def test_fingerprints_are_the_same_in_every_release() -> None:
    """Literal values, so that no word of the vocabulary is renamed unseen: two releases would not agree."""
    assert CorrectionSpec().fingerprint() == 868979497
    assert spec(TIS).fingerprint() == 1591711840
    assert spec(gsm=GSM).fingerprint() == 960502562


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
        mask(when="positive", sign="token"),
        mask(level="turn"),
        mask(level="version"),
        mask(level="token"),
        mask(aggregate="any"),
        mask(aggregate="k1_mean"),
        mask(aggregate="k3_mean"),
        mask(aggregate="k3_max"),
        {"masks": {"gsm": M2PO}},
        {"masks": {"gsm": M2PO | {"budget": 0.05}}},
        weight(kind="reject"),
        weight(aggregate="geometric"),
        weight(ratio="full"),
        weight(normalize=True),
        {"proximal": "bypass"},
        {"proximal": "reuse"},
        {"proximal": "loglinear", "alpha": 0.5},
        {"proximal": "loglinear", "alpha": 0.25},
        {"kl_clip": {"lower": 0.8, "upper": 1.2}},
        {"kl_clip": {"lower": 0.8, "upper": 1.3}},
        {"skyrl_compat": True},
        {"denominator": "kept", **mask()},
        {"baseline": "exclude", **mask()},
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
        ({7: "seven"}, "correction.7", "seven"),
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
    refused(
        {"masks": {"opsm": clash}}, "opsm.delta=0.1", f"opsm.{side}=0.9", "Give delta, or budget, or the two bounds"
    )


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
    assert CorrectionSpec.from_mapping(mask(lower=1.0, upper=1.0)).masks[0][1].limits == (0.0, 0.0)


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
        (weight(kind="trunc"), "correction.weight.kind='trunc'", "truncate, clip, reject"),
        (mask(ratio="old"), "correction.masks.gsm.ratio='old'", "rollout, full, ppo"),
        (weight(level="response"), "correction.weight.level='response'", "token, sequence, turn, version"),
        (weight(aggregate="mean"), "correction.weight.aggregate='mean'", "product, geometric"),
        (weight(aggregate=None), "correction.weight.aggregate=None", "product, geometric"),
        (weight(ratio="ppo"), "correction.weight.ratio='ppo'", "rollout, full"),
        (mask(aggregate="mean"), "correction.masks.gsm.aggregate='mean'", "product, geometric, any, k1_sum"),
        (mask(aggregate="k4_sum"), "correction.masks.gsm.aggregate='k4_sum'", "tv_max, binary_tv, second_moment"),
        (mask(sign="group"), "correction.masks.gsm.sign='group'", "row, token"),
        (mask(sign=None), "correction.masks.gsm.sign=None", "row, token"),
        ({"proximal": "none"}, "correction.proximal='none'", "recompute, bypass, reuse, loglinear"),
        ({"proximal": None}, "correction.proximal=None", "recompute, bypass, reuse, loglinear"),
        ({"denominator": "masked"}, "correction.denominator='masked'", "original, kept"),
        ({"baseline": "drop"}, "correction.baseline='drop'", "include, exclude"),
        (mask(when="A<0"), "correction.masks.gsm.when='A<0'", "any, negative, positive"),
        (mask(when=True), "correction.masks.gsm.when=True", "any, negative, positive"),
        (mask(level="response"), "correction.masks.gsm.level='response'", "token, sequence, turn, version"),
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


@pytest.mark.parametrize("bad", ["yes", 1, 0, None, "true", "???"])
def test_truth_values(bad: Any) -> None:
    for key in ("allow_truncated_sampling", "skyrl_compat"):
        refused({key: bad}, f"correction.{key}=", repr(bad), "true or false")
    refused(weight(normalize=bad), "correction.weight.normalize", repr(bad) if bad != "???" else "required")


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
    refused(mapping, f"{key} is required and not set", f"Set {key}=")


@pytest.mark.parametrize("key", ["weight", "masks", "proximal", "alpha", "denominator", "baseline", "kl_clip"])
def test_a_value_that_the_option_asks_for_at_the_top(key: str) -> None:
    refused({key: "???"}, f"correction.{key}=", "???")


# Masks: bounds of each aggregate ----------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["k2_sum", "k2_mean", "k3_max", "k3_sum", "tv_mean", "tv_max"])
@pytest.mark.parametrize("side", ["lower", "upper"])
def test_bounds_of_what_is_never_negative(aggregate: str, side: str) -> None:
    bounds = {"lower": None, "upper": None} | {side: -0.1}
    refused(mask(aggregate=aggregate, **bounds), f"masks.gsm.{side}=-0.1", "never negative", "Set a bound >= 0")


@pytest.mark.parametrize("side", ["lower", "upper"])
def test_bounds_of_a_difference_of_probabilities(side: str) -> None:
    bounds = {"lower": None, "upper": None} | {side: -1.1 if side == "lower" else 1.1}
    refused(mask(aggregate="binary_tv", **bounds), f"masks.gsm.{side}=", "[-1, 1]", "Set it inside")


def test_signed_bounds() -> None:
    for aggregate in ("k1_sum", "k1_mean", "k1_max", "binary_tv"):
        assert CorrectionSpec.from_mapping(mask(aggregate=aggregate, lower=-0.2, upper=-0.1))


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
    refused(mask(aggregate=aggregate, lower=lower, upper=upper), f"masks.gsm.lower={lower}", "never acts", "Set")


@pytest.mark.parametrize("aggregate", ["k1_mean", "k3_mean", "tv_sum", "binary_tv", "any"])
def test_crossed_bounds_of_every_aggregate(aggregate: str) -> None:
    refused(mask(aggregate=aggregate, lower=0.9, upper=0.1), "masks.gsm.lower=0.9", "upper=0.1", "Swap the bounds")


@pytest.mark.parametrize("bad", [math.nan, math.inf, "0.1", True])
def test_bounds_of_every_aggregate_are_numbers(bad: Any) -> None:
    for aggregate in ("any", "k1_mean", "k3_mean", "tv_sum", "binary_tv"):
        refused(mask(aggregate=aggregate, lower=None, upper=bad), "correction.masks.gsm.upper=", "expected a", "null")


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


def test_the_sign_of_an_advantage_that_is_not_looked_at() -> None:
    refused(mask(sign="token"), "masks.gsm.sign=token", "masks.gsm.when=any", "Set correction.masks.gsm.when=negative")
    assert CorrectionSpec.from_mapping(mask(sign="row"))


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
    refused({"masks": {"m": M2PO | {"budget": bad}}}, f"masks.m.budget={bad}", "> 0", "Set correction.masks.m.budget=")


@pytest.mark.parametrize("bad", [math.nan, math.inf, "0.04", True])
def test_a_budget_is_a_number(bad: Any) -> None:
    refused({"masks": {"m": M2PO | {"budget": bad}}}, "correction.masks.m.budget=", "expected a")


def test_a_budget_is_of_second_moment_alone() -> None:
    clash = M2PO | {"aggregate": "geometric"}
    refused({"masks": {"m": clash}}, "masks.m.aggregate=geometric", "budget", "Set correction.masks.m.budget=")
    bounded = without(M2PO, "budget") | {"lower": None, "upper": 0.04}
    refused({"masks": {"m": bounded}}, "masks.m.aggregate=second_moment", "lower, upper", "budget")
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


# Parts that cannot go together ------------------------------------------------------------------------------


def test_bypass_counts_a_weight_twice() -> None:
    refused(
        weight() | {"proximal": "bypass"},
        "correction.weight.ratio=rollout",
        "correction.proximal=bypass",
        "correction.weight=null",
        "correction.proximal=recompute",
    )
    assert CorrectionSpec.from_mapping(weight(ratio="full") | {"proximal": "bypass"})


@pytest.mark.parametrize(
    ("proximal", "inert", "live"), [("bypass", "rollout", ("full", "ppo")), ("reuse", "ppo", ("full", "rollout"))]
)
def test_masks_on_a_ratio_that_is_one(proximal: str, inert: str, live: tuple[str, ...]) -> None:
    refused(
        mask(ratio=inert, when="negative") | {"proximal": proximal},
        f"correction.masks.gsm.ratio={inert}",
        f"correction.proximal={proximal}",
        "Set correction.masks.gsm.ratio=full",
        "correction.proximal=recompute",
    )
    for ratio in live:
        assert CorrectionSpec.from_mapping(mask(ratio=ratio) | {"proximal": proximal})


def test_loglinear_has_no_inert_ratio() -> None:
    for ratio in ("rollout", "full", "ppo"):
        assert CorrectionSpec.from_mapping(mask(ratio=ratio) | {"proximal": "loglinear", "alpha": 0.5})


@pytest.mark.parametrize("alpha", [None, 0, 1, -0.5, 1.5])
def test_alpha_lies_between_bypass_and_reuse(alpha: Any) -> None:
    shown = None if alpha is None else float(alpha)
    refused({"proximal": "loglinear", "alpha": alpha}, f"correction.alpha={shown}", "Set correction.alpha=0.5")


@pytest.mark.parametrize("alpha", [math.nan, math.inf, "0.5", True])
def test_alpha_is_a_number(alpha: Any) -> None:
    refused({"proximal": "loglinear", "alpha": alpha}, "correction.alpha=", "expected a")


@pytest.mark.parametrize("proximal", ["recompute", "bypass", "reuse"])
def test_alpha_without_loglinear(proximal: str) -> None:
    refused(
        {"proximal": proximal, "alpha": 0.5},
        "correction.alpha=0.5",
        f"correction.proximal={proximal}",
        "Set correction.proximal=loglinear",
        "correction.alpha=null",
    )


@pytest.mark.parametrize(
    "bounds", [(1.0, 1.2), (0.8, 1.0), (1.1, 1.2), (0.7, 0.9), (None, 1.2), (0.8, None), (None, None)]
)
def test_a_kl_clip_that_is_not_around_one(bounds: tuple[float | None, float | None]) -> None:
    lower, upper = bounds
    refused(
        {"kl_clip": {"lower": lower, "upper": upper}},
        f"correction.kl_clip={{lower: {lower}, upper: {upper}}}",
        "Set correction.kl_clip.lower=0.8",
    )


def test_a_kl_clip_that_is_malformed() -> None:
    refused({"kl_clip": 0.2}, "correction.kl_clip=0.2", "mapping")
    refused({"kl_clip": {"lower": 0.8}}, "correction.kl_clip", "upper: None", "Set correction.kl_clip.lower=0.8")
    refused({"kl_clip": {"lower": 0.8, "upper": 1.2, "low": 1}}, "correction.kl_clip.low=1", "unknown key")
    refused({"kl_clip": {"lower": 0.8, "upper": "1.2"}}, "correction.kl_clip.upper=", "expected a number")
    refused({"kl_clip": {"lower": -0.8, "upper": 1.2}}, "correction.kl_clip.lower=-0.8", "Set a bound > 0")


def test_a_kl_clip_of_a_ratio_that_is_one() -> None:
    clip = {"kl_clip": {"lower": 0.8, "upper": 1.2}}
    refused(clip | {"proximal": "reuse"}, "correction.kl_clip", "correction.proximal=reuse", "correction.kl_clip=null")
    assert CorrectionSpec.from_mapping(clip | {"proximal": "bypass"}).kl_clip == (0.8, 1.2)


@pytest.mark.parametrize("proximal", [{"proximal": "reuse"}, {"proximal": "loglinear", "alpha": 0.5}])
@pytest.mark.parametrize(
    ("mapping", "key"),
    [
        (weight(normalize=True), "correction.weight.normalize=true"),
        ({"masks": {"m": M2PO}}, "correction.masks.m.budget=0.04"),
        (mask() | {"denominator": "kept"}, "correction.denominator=kept"),
        (mask() | {"baseline": "exclude"}, "correction.baseline=exclude"),
    ],
)
def test_what_is_fixed_by_a_pi_old_that_is_not_known(
    mapping: dict[str, Any], key: str, proximal: dict[str, Any]
) -> None:
    refused(mapping | proximal, key, f"correction.proximal={proximal['proximal']}", "correction.proximal=recompute")


@pytest.mark.parametrize(
    ("key", "value", "default"), [("denominator", "kept", "original"), ("baseline", "exclude", "include")]
)
def test_what_counts_the_kept_is_decided_before_the_step(key: str, value: str, default: str) -> None:
    fix = f"Set correction.{key}={default}"
    for late in (mask(when="negative"), mask(ratio="full"), mask(ratio="ppo")):
        refused(late | {key: value}, f"correction.{key}={value}", "correction.masks.gsm", fix)
    late = weight(kind="reject", ratio="full") | mask()
    refused(late | {key: value}, f"correction.{key}={value}", "correction.weight", fix)
    refused({key: value}, f"correction.{key}={value}", fix)
    refused(weight() | {key: value}, f"correction.{key}={value}", fix)
    for early in (mask(), weight(kind="reject", level="sequence"), weight(ratio="full") | mask()):
        assert CorrectionSpec.from_mapping(early | {key: value})


def test_a_baseline_is_of_rows() -> None:
    tokens = mask(level="token")
    refused(tokens | {"baseline": "exclude"}, "correction.baseline=exclude", "rejects rows", "a mask by sequence")
    assert CorrectionSpec.from_mapping(tokens | {"denominator": "kept"})


@pytest.mark.parametrize(
    ("foreign", "named"),
    [
        (mask(level="turn"), "level turn"),
        (mask(level="version"), "level version"),
        (mask(aggregate="k3_mean"), "aggregate k3_mean"),
        (mask(when="negative"), "when negative"),
        (mask(ratio="full"), "ratio full"),
    ],
)
def test_masks_that_skyrl_does_not_have(foreign: dict[str, Any], named: str) -> None:
    refused(
        foreign | {"skyrl_compat": True},
        "correction.skyrl_compat=true",
        "correction.masks.gsm",
        named,
        "Set correction.skyrl_compat=false",
    )


@pytest.mark.parametrize(
    ("foreign", "named"),
    [
        (weight(level="turn"), "level turn"),
        (weight(level="version"), "level version"),
        (weight(aggregate="geometric"), "aggregate geometric"),
        (weight(kind="reject"), "kind reject"),
        (weight(ratio="full"), "ratio full"),
    ],
)
def test_weights_that_skyrl_does_not_have(foreign: dict[str, Any], named: str) -> None:
    refused(
        foreign | {"skyrl_compat": True},
        "correction.skyrl_compat=true",
        "correction.weight",
        named,
        "Set correction.skyrl_compat=false",
    )


def test_batches_that_skyrl_does_not_know() -> None:
    for mapping in (weight(normalize=True), mask() | {"denominator": "kept"}, mask() | {"baseline": "exclude"}):
        refused(mapping | {"skyrl_compat": True}, "correction.skyrl_compat=true", "Set correction.skyrl_compat=false")
