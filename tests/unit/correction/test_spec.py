"""What a correction holds, and the number by which two of them are one."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec, MaskSpec, WeightSpec
from recipe.offpolicy.correction.read_parts import read_mask
from tests.support.corrections import GSM, M2PO, TIS, band, opsm, spec
from tests.support.refusals import STACK, mask, weight, without

# What a spec holds ------------------------------------------------------------------------------------------


def test_the_vocabulary_of_the_specification() -> None:
    correction = CorrectionSpec.from_mapping(STACK)
    assert correction.weight == WeightSpec("token", "truncate", None, 2.0)
    assert dict(correction.masks) == {
        "gsm": MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any"),
        "opsm": MaskSpec("full", "sequence", "geometric", math.exp(-0.1), None, "negative", delta=0.1),
    }
    assert not correction.is_none


def test_limits_of_ratios_are_in_log_space() -> None:
    # log 0.99 = -0.0100503, log 1.01 = 0.0099503; delta = 0.1 stands for lower = exp(-0.1), kept as -0.1 exactly.
    lower, upper = read_mask(GSM, key="k").limits
    assert lower == pytest.approx(-0.01005034, abs=1e-8)
    assert upper == pytest.approx(0.00995033, abs=1e-8)
    assert read_mask(opsm(0.1), key="k").limits == (-0.1, math.inf)
    assert read_mask(band(None, 2.0), key="k").limits == (-math.inf, math.log(2.0))


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
        STACK | {"support": "engine", "support_unknown": "full", "support_min_p": 0.1},
    ],
)
def test_to_mapping_is_plain_and_comes_back(mapping: dict[str, Any]) -> None:
    correction = CorrectionSpec.from_mapping(mapping)
    plain = json.loads(json.dumps(correction.to_mapping()))
    assert CorrectionSpec.from_mapping(plain) == correction
    assert CorrectionSpec.from_mapping(plain).fingerprint() == correction.fingerprint()


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
        {"support": "engine"},
        {"support": "engine", "support_size": 8},
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
