"""The content of a correction, the fingerprint that identifies it, and bounds that move during a run."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.correction.spec import WEIGHT, read_bounds, replace_bounds
from tests.support.corrections import GSM, M2PO, TIS, opsm, spec
from tests.support.refusals import mask, weight, without

# What a spec holds ------------------------------------------------------------------------------------------


def test_which_parts_wait_for_the_step_and_which_reject_before() -> None:
    reject = TIS | {"kind": "reject"}
    assert spec(TIS, gsm=GSM, opsm=opsm(0.1)).step_parts.keys() == {"masks.opsm"}
    assert spec(TIS, gsm=GSM, opsm=opsm(0.1)).rollout_rejects.keys() == {"masks.gsm"}
    assert spec(reject, gsm=GSM).rollout_rejects.keys() == {"weight", "masks.gsm"}
    assert spec(reject | {"ratio": "full"}, gsm=GSM).step_parts.keys() == {"weight"}
    assert spec(reject | {"ratio": "full"}, gsm=GSM).rollout_rejects.keys() == {"masks.gsm"}


# Fingerprint ------------------------------------------------------------------------------------------------


def test_fingerprints_are_the_same_in_every_release() -> None:
    """The values are literals, so a renamed word of the vocabulary is noticed; otherwise two releases would
    disagree.
    """
    assert CorrectionSpec().fingerprint() == 868979497
    assert spec(TIS).fingerprint() == 1591711840
    assert spec(gsm=GSM).fingerprint() == 960502562


VARIANTS: list[dict[str, Any]] = [
    {},
    *({"proximal": each} for each in ("bypass", "same_engine", "reuse")),
    *({"proximal": "loglinear", "alpha": alpha} for alpha in (0.5, 0.25, "by_age")),
    *({"kl_clip": {"lower": 0.8, "upper": upper}} for upper in (1.2, 1.3)),
    {"allow_truncated_sampling": True},
    {"support": "engine"},
    {"support": "engine", "support_size": 8, "support_unknown": "full", "support_min_p": 0.1},
    {"centering": 20},
    {"skyrl_compat": True, **mask(), **weight()},
    {"denominator": "kept", **mask()},
    {"baseline": "exclude", **mask()},
    {"nonfinite": "excluded", **mask()},
    {"penalty": {"ratio": "full", "coefficient": 0.1}},
    *({"weights": {"a": TIS | {"when": when}}} for when in ("negative", "positive", "post_tool")),
    *(weight(upper=upper) for upper in (2.0, 2.0000001, None)),
    *(weight(level=level) for level in ("sequence", "turn", "version", "prefix")),
    *(weight(kind="clip", lower=lower) for lower in (0.5, 2.0)),
    *(weight(**change) for change in ({"kind": "reject"}, {"aggregate": "geometric"}, {"ratio": "full"})),
    weight(normalize=True),
    weight(lower=2.0, upper=None),
    weight(by_staleness=[1.0, 2.0]),
    {**weight(), **mask()},
    mask(),
    {"masks": {"other": GSM}},
    {"masks": {"gsm": GSM, "second": GSM}},
    *(mask(lower=lower) for lower in (None, 0.98)),
    *(mask(upper=upper) for upper in (None, 1.02)),
    *(mask(ratio=ratio) for ratio in ("full", "ppo")),
    *(mask(level=level) for level in ("token", "turn", "version", "prefix")),
    *(mask(aggregate=aggregate) for aggregate in ("product", "any", "k1_mean", "k3_mean", "k3_max")),
    *(mask(when=when) for when in ("negative", "positive", "outward")),
    mask(when="positive", sign="token"),
    *({"masks": {"gsm": M2PO | {"budget": budget}}} for budget in (0.04, 0.05)),
    *({"masks": {"gsm": opsm(delta)}} for delta in (0.0, 0.1, 0.2)),
    {"masks": {"gsm": without(opsm(0.1), "delta") | {"lower": math.exp(-0.1), "upper": None}}},
    {"masks": {"gsm": {"aggregate": "staleness", "level": "token", "upper": 4}}},
]


def test_each_correction_comes_back_from_its_mapping_with_a_fingerprint_of_its_own() -> None:
    found = set()
    for variant in VARIANTS:
        correction = CorrectionSpec.from_mapping(variant)
        again = CorrectionSpec.from_mapping(json.loads(json.dumps(correction.to_mapping())))
        assert pickle.loads(pickle.dumps(correction)) == again == correction, variant
        assert again.fingerprint() == correction.fingerprint()
        found.add(correction.fingerprint())
    assert len(found) == len(VARIANTS)
    assert all(0 <= each < 2**31 for each in found)


BOTH = spec(TIS, gsm=GSM)


def test_bounds_are_found_by_name() -> None:
    assert read_bounds(BOTH, {"gsm", WEIGHT}) == {"gsm": {"lower": 0.99, "upper": 1.01}, WEIGHT: {"upper": 2.0}}
    assert read_bounds(BOTH, {"opsm"}) == {}
    assert read_bounds(spec(None, gsm=GSM), {WEIGHT}) == {}


def test_bounds_are_put_in_and_nothing_else_changes() -> None:
    moved = replace_bounds(BOTH, {"gsm": {"lower": 0.9, "upper": 1.1}, WEIGHT: {"upper": 3.0}})
    assert moved == spec(TIS | {"upper": 3.0}, gsm=GSM | {"lower": 0.9, "upper": 1.1})
    assert replace_bounds(BOTH, read_bounds(BOTH, {"gsm", WEIGHT})) is BOTH


def test_bounds_of_no_part_and_bounds_that_cross_are_refused() -> None:
    with pytest.raises(KeyError, match="opsm"):
        replace_bounds(BOTH, {"opsm": {"upper": 0.1}})
    with pytest.raises(SpecError):
        replace_bounds(BOTH, {"gsm": {"lower": 1.2, "upper": 1.1}})
