"""Parts of a correction that cannot go together are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.problem import format_value
from tests.support.corrections import M2PO
from tests.support.refusals import mask, refused, weight

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


def test_a_weight_is_one_where_mu_is_pi_old() -> None:
    refused(
        weight() | {"proximal": "same_engine"},
        "correction.weight.ratio=rollout",
        "correction.proximal=same_engine",
        "mu is checked to equal pi_old, so the weight is 1",
        "correction.proximal=recompute",
    )
    assert CorrectionSpec.from_mapping(weight(ratio="full") | {"proximal": "same_engine"})


@pytest.mark.parametrize(
    ("proximal", "inert", "live"),
    [
        ("bypass", "rollout", ("full", "ppo")),
        ("same_engine", "rollout", ("full", "ppo")),
        ("reuse", "ppo", ("full", "rollout")),
    ],
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


@pytest.mark.parametrize("alpha", [None, 0, 1, -0.5, 1.5])
def test_alpha_lies_between_bypass_and_reuse(alpha: Any) -> None:
    given = format_value(None if alpha is None else float(alpha))
    refused({"proximal": "loglinear", "alpha": alpha}, f"correction.alpha={given}", "Set correction.alpha=0.5")


@pytest.mark.parametrize("alpha", [math.nan, math.inf, "0.5", True])
def test_alpha_is_a_number(alpha: Any) -> None:
    refused({"proximal": "loglinear", "alpha": alpha}, "correction.alpha=", "expected a")


@pytest.mark.parametrize("proximal", ["recompute", "bypass", "reuse", "same_engine"])
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
        f"correction.kl_clip={{lower: {format_value(lower)}, upper: {format_value(upper)}}}",
        "Set correction.kl_clip.lower=0.8",
    )


def test_a_kl_clip_that_is_malformed() -> None:
    refused({"kl_clip": 0.2}, "correction.kl_clip=0.2", "mapping")
    refused({"kl_clip": {"lower": 0.8}}, "correction.kl_clip", "upper: null", "Set correction.kl_clip.lower=0.8")
    refused({"kl_clip": {"lower": 0.8, "upper": 1.2, "low": 1}}, "correction.kl_clip.low=1", "unknown key")
    refused({"kl_clip": {"lower": 0.8, "upper": "1.2"}}, "correction.kl_clip.upper=", "expected a number")
    refused({"kl_clip": {"lower": -0.8, "upper": 1.2}}, "correction.kl_clip.lower=-0.8", "Set a bound > 0")


def test_a_kl_clip_of_a_ratio_that_is_one() -> None:
    clip = {"kl_clip": {"lower": 0.8, "upper": 1.2}}
    refused(
        clip | {"proximal": "reuse"}, "correction.kl_clip", "correction.proximal=reuse", "correction.proximal=recompute"
    )
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
        (mask(level="turn"), "level: turn"),
        (mask(level="version"), "level: version"),
        (mask(aggregate="k3_mean"), "aggregate: k3_mean"),
        (mask(when="negative"), "when: negative"),
        (mask(ratio="full"), "ratio: full"),
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
        (weight(level="turn"), "level: turn"),
        (weight(level="version"), "level: version"),
        (weight(aggregate="geometric"), "aggregate: geometric"),
        (weight(kind="reject"), "kind: reject"),
        (weight(ratio="full"), "ratio: full"),
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
