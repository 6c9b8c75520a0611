"""Corrections in the keys of SkyRL, TRL and verl: round trips, and what these cannot say."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from tests.support.corrections import GSM, M2PO, TIS, band, opsm, spec
from tests.support.drawn import corrections, examples
from tests.support.presets import PRESETS

LOW, HIGH = draw.sampled_from([1e-4, 0.5, 0.9, 0.99]), draw.sampled_from([1.01, 1.5, 2.0, 100.0])


@draw.composite
def skyrl(draw_one: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    level = draw_one(draw.sampled_from([None, "token", "sequence"]))
    if level:
        keys |= {"tis_ratio_type": level, f"{level}_tis_ratio_clip_high": draw_one(HIGH)}
    metric = draw_one(draw.sampled_from([None, "geometric", "product"]))
    if metric:
        stem = {"geometric": "geo", "product": "product"}[metric]
        keys |= {"sequence_mask_metric": metric, f"{stem}_mask_low": draw_one(LOW), f"{stem}_mask_high": draw_one(HIGH)}
    for stem in ("outlier_token_is", "token_mask_is"):
        if draw_one(draw.booleans()):
            keys |= {f"{stem}_threshold_low": draw_one(LOW), f"{stem}_threshold_high": draw_one(HIGH)}
    return keys


@draw.composite
def trl(draw_one: Any) -> dict[str, Any]:
    stem = "vllm_importance_sampling"
    level, action = (
        draw_one(draw.sampled_from(["token", "sequence"])),
        draw_one(draw.sampled_from(["mask", "truncate"])),
    )
    keys = {
        f"{stem}_correction": draw_one(draw.booleans()),
        f"{stem}_mode": f"{level}_{action}",
        f"{stem}_clip_max": draw_one(HIGH),
        f"{stem}_clip_min": draw_one(draw.none() | LOW),
        "off_policy_mask_threshold": draw_one(draw.none() | draw.sampled_from([0.0, 0.05, 0.5])),
    }
    return keys


K1 = ("token_k1", "seq_sum_k1", "seq_mean_k1")
K2 = ("token_k2", "token_k3", "seq_sum_k3", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3")


@draw.composite
def verl(draw_one: Any) -> dict[str, Any]:
    bypass = draw_one(draw.booleans())
    keys: dict[str, Any] = {"bypass_mode": bypass}
    level = draw_one(draw.sampled_from([None, "token", "sequence"]))
    if level:
        band = f"{draw_one(LOW)}_{draw_one(HIGH)}"
        keys |= {"rollout_is": level, "rollout_is_threshold": draw_one(draw.sampled_from([2.0, 5.0, "0.8", band]))}
        keys["rollout_is_batch_normalize"] = not bypass and draw_one(draw.booleans())
        keys["loss_type"] = "reinforce" if bypass else "ppo_clip"
    options = draw_one(draw.lists(draw.sampled_from([*K1, *K2]), max_size=3, unique=True))
    if options:
        keys["rollout_rs"] = ",".join(options)
        keys["rollout_rs_threshold"] = ",".join(
            f"{draw_one(LOW)}_{draw_one(HIGH)}" if option in K1 else str(draw_one(HIGH)) for option in options
        )
    return keys


@examples
@given(skyrl())
def test_what_skyrl_says_comes_back_from_ours(keys: dict[str, Any]) -> None:
    ours = CorrectionSpec.from_skyrl(keys)
    assert CorrectionSpec.from_skyrl(ours.to_skyrl()) == ours


@examples
@given(trl())
def test_what_trl_says_comes_back_from_ours(keys: dict[str, Any]) -> None:
    ours = CorrectionSpec.from_trl(keys)
    assert CorrectionSpec.from_trl(ours.to_trl()) == ours


def nearly(one: dict[str, Any]) -> Any:
    """The plain values with bounds to 12 digits: 1 / (1 / x) may differ in the last."""
    return {
        key: nearly(value) if isinstance(value, dict) else float(f"{value:.12g}") if type(value) is float else value
        for key, value in one.items()
    }


@examples
@given(verl())
def test_what_verl_says_comes_back_from_ours(keys: dict[str, Any]) -> None:
    ours = CorrectionSpec.from_verl(keys)
    assert nearly(CorrectionSpec.from_verl(ours.to_verl()).to_mapping()) == nearly(ours.to_mapping())


@pytest.mark.parametrize("name", ["skyrl", "trl", "verl"])
@examples
@given(corrections(by_age=True))
def test_what_is_said_at_all_is_the_same_correction(name: str, correction: CorrectionSpec) -> None:
    """Of any correction: refused with one of our own keys, or back again but for the names of masks."""
    refusal, theirs = "", {}
    try:
        theirs = getattr(correction, f"to_{name}")()
    except SpecError as error:
        refusal = error.problem.key
    if refusal:
        assert refusal.startswith("correction.")
        return
    back = getattr(CorrectionSpec, f"from_{name}")(theirs)
    shapes = [sorted(map(repr, (nearly(mask.to_mapping()) for _, mask in each.masks))) for each in (correction, back)]
    assert shapes[0] == shapes[1] or name == "skyrl"  # of whose token mask `any` and `product` are one
    left, right = (nearly(each.to_mapping()) for each in (correction, back))
    assert {key: left[key] for key in left if key != "masks"} == {key: right[key] for key in right if key != "masks"}


@pytest.mark.parametrize("name", ["skyrl", "trl", "verl"])
def test_every_option_is_said_or_refused(name: str) -> None:
    said = []
    for option, correction in PRESETS.items():
        with contextlib.suppress(SpecError):
            getattr(correction, f"to_{name}")()
            said.append(option)
    assert "tis_token" in said


@pytest.mark.parametrize("option", [name for name in PRESETS if name.startswith("verl/")])
def test_verls_own_presets_can_be_said_to_verl(option: str) -> None:
    ours = PRESETS[option]
    assert nearly(CorrectionSpec.from_verl(ours.to_verl()).to_mapping()) | {"masks": 0} == nearly(ours.to_mapping()) | {
        "masks": 0
    }


def test_by_hand() -> None:
    assert spec(TIS, gsm=GSM).to_skyrl() == {
        "tis_ratio_type": "token",
        "sequence_mask_metric": "geometric",
    }  # 2.0 and [0.99, 1.01] are SkyRL's defaults
    assert spec(TIS, opsm=opsm(0.1)).to_trl() == {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 2.0,
        "vllm_importance_sampling_clip_min": None,
        "off_policy_mask_threshold": 0.1,
        "use_bias_correction_kl": False,
        "use_vllm": True,
    }
    # verl bounds mu / pi_old: [0.5, 4] is 0.25_2.0 there.
    assert spec(None, m=band(0.5, 4.0)).to_verl() == {
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.25_2.0",
    }
    assert CorrectionSpec().to_verl() == CorrectionSpec().to_skyrl() == {}


NEGATIVE = TIS | {"when": "negative"}
EVERYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"weights": {"a": NEGATIVE}}, "correction.weights="),
    ({"masks": {"m": GSM}, "denominator": "kept"}, "correction.denominator=kept"),
    ({"masks": {"m": GSM}, "nonfinite": "excluded"}, "correction.nonfinite=excluded"),
    ({"masks": {"m": GSM}, "baseline": "exclude"}, "correction.baseline=exclude"),
    ({"kl_clip": {"lower": 0.8, "upper": 1.2}}, "correction.kl_clip="),
    ({"kl_weight": {"ratio": "ppo", "upper": None}}, "correction.kl_weight="),
    ({"penalty": {"ratio": "full", "coefficient": 0.1}}, "correction.penalty="),
    ({"proximal": "reuse"}, "correction.proximal=reuse"),
    ({"proximal": "loglinear", "alpha": 0.5}, "correction.alpha=0.5"),
    ({"weight": TIS | {"level": "turn"}}, "correction.weight.level=turn"),
    ({"weight": TIS | {"aggregate": "geometric", "level": "sequence"}}, "correction.weight.aggregate=geometric"),
    ({"weight": TIS | {"by_staleness": [1.0, 2.0]}}, "correction.weight.by_staleness="),
    ({"masks": {"m": M2PO}}, "correction.masks.m"),
    ({"masks": {"m": GSM | {"level": "turn"}}}, "correction.masks.m"),
    ({"masks": {"m": opsm(0.1, ratio="ppo")}}, "correction.masks.m"),
    ({"masks": {"m": {"aggregate": "staleness", "level": "token", "upper": 4}}}, "correction.masks.m"),
    ({"masks": {"m": band(None, 0.1, aggregate="binary_kl")}}, "correction.masks.m"),
    ({"support": "engine", "weight": TIS}, "correction.support=engine"),
    ({"allow_truncated_sampling": True, "weight": TIS}, "correction.allow_truncated_sampling=true"),
]


@pytest.mark.parametrize("name", ["skyrl", "trl", "verl"])
@pytest.mark.parametrize(("mapping", "key"), EVERYWHERE, ids=[key for _, key in EVERYWHERE])
def test_what_none_of_them_can_say_is_named(name: str, mapping: dict[str, Any], key: str) -> None:
    with pytest.raises(SpecError) as caught:
        getattr(CorrectionSpec.from_mapping(mapping), f"to_{name}")()
    assert str(caught.value).startswith(key)
    assert "cannot express this" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "mapping", "key"),
    [
        ("skyrl", {"weight": TIS | {"kind": "clip", "lower": 0.5}}, "correction.weight.kind=clip"),
        ("skyrl", {"masks": {"a": GSM, "b": band(0.5, 2.0, aggregate="product")}}, "correction.masks.b"),
        (
            "skyrl",
            {"masks": {"a": GSM, "b": band(level="token", lower=0.5, upper=2.0, aggregate="any")}},
            "correction.skyrl",
        ),
        ("skyrl", {"masks": {"a": band(None, 1.01)}}, "correction.masks.a"),
        ("trl", {"masks": {"a": GSM}}, "correction.masks.a"),
        ("trl", {"masks": {"a": opsm(0.1), "b": opsm(0.2)}}, "correction.masks.b"),
        ("trl", {"weight": TIS | {"normalize": True}}, "correction.weight.normalize=true"),
        ("trl", {"weight": TIS | {"upper": None}}, "correction.weight.upper=null"),
        ("verl", {"weight": TIS | {"kind": "clip", "lower": 0.5}}, "correction.weight.kind=clip"),
        ("verl", {"weight": TIS | {"kind": "reject"}}, "correction.weight.lower=null"),
        ("verl", {"masks": {"a": band(None, 1.01)}}, "correction.masks.a"),
        ("verl", {"masks": {"a": GSM, "b": GSM}}, "correction.masks.b"),
        ("verl", {"masks": {"a": band(0.1, 0.5, aggregate="k3_mean")}}, "correction.masks.a"),
    ],
)
def test_what_one_of_them_cannot_say_is_named(name: str, mapping: dict[str, Any], key: str) -> None:
    with pytest.raises(SpecError) as caught:
        getattr(CorrectionSpec.from_mapping(mapping), f"to_{name}")()
    assert str(caught.value).startswith(key), str(caught.value)
