"""Fixes of malformed values: what a SpecError tells, and that its overrides, pasted, make a correction."""

from __future__ import annotations

from typing import Any

import pytest
from corrections import GSM, TIS, opsm
from mended import with_overrides
from omegaconf import OmegaConf

from recipe.offpolicy.checks.own_keys import _problem, own_keys
from recipe.offpolicy.composition import own_keys_for_us
from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.correction.dialects.verl import verl_rejections
from recipe.offpolicy.findings import Problem, named_overrides, told
from recipe.offpolicy.recording.card import FIX

WEIGHT = "correction.weight"
MASK = "correction.masks.gsm"


def masks(**changes: Any) -> dict[str, Any]:
    return {"masks": {"gsm": GSM | changes}}


def malformed(mapping: dict[str, Any]) -> Problem:
    with pytest.raises(SpecError) as caught:
        CorrectionSpec.from_mapping(mapping)
    return told(caught.value)


# What is given -> key, value, and overrides that mend it.
MALFORMED: dict[str, tuple[dict[str, Any], str, Any, list[str]]] = {
    "misspelt": (
        {"weight": TIS | {"uper": 3.0}},
        f"{WEIGHT}.uper",
        3.0,
        [f"~{WEIGHT}.uper", f"{WEIGHT}.upper=3.0"],
    ),
    "unknown": ({"weight": TIS | {"zzz": 3.0}}, f"{WEIGHT}.zzz", 3.0, [f"~{WEIGHT}.zzz"]),
    "a section misspelt": ({"wieght": dict(TIS)}, "correction.wieght", dict(TIS), ["~correction.wieght"]),
    "negative cap": ({"weight": TIS | {"upper": -1}}, f"{WEIGHT}.upper", -1.0, [f"{WEIGHT}.upper=2.0"]),
    "negative bound beside another": (masks(lower=-1), f"{MASK}.lower", -1.0, [f"{MASK}.lower=null"]),
    "crossed": (masks(lower=2.0), f"{MASK}.lower", 2.0, [f"{MASK}.lower=1.01", f"{MASK}.upper=2.0"]),
    "proximal": ({"proximal": "x"}, "correction.proximal", "x", ["correction.proximal=recompute"]),
    "proximal misspelt": ({"proximal": "bypas"}, "correction.proximal", "bypas", ["correction.proximal=bypass"]),
    "denominator": ({"denominator": "z"}, "correction.denominator", "z", ["correction.denominator=original"]),
    "baseline": ({"baseline": "z"}, "correction.baseline", "z", ["correction.baseline=include"]),
    "delta left open": ({"masks": {"gsm": opsm(0.1) | {"delta": "???"}}}, "", None, [f"{MASK}.delta=0.1"]),
    "lower left out": (
        {"weight": {key: value for key, value in TIS.items() if key != "lower"}},
        "",
        None,
        [f"{WEIGHT}.lower=null"],
    ),
    "a number in quotes": ({"weight": TIS | {"upper": "3"}}, f"{WEIGHT}.upper", "3", [f"{WEIGHT}.upper=3.0"]),
    "infinite": ({"weight": TIS | {"upper": float("inf")}}, f"{WEIGHT}.upper", float("inf"), [f"{WEIGHT}.upper=null"]),
    "truth": ({"weight": TIS | {"normalize": "yes"}}, f"{WEIGHT}.normalize", "yes", [f"{WEIGHT}.normalize=false"]),
    "clip of KL": (
        {"kl_clip": {"lower": 0.5, "upper": 0.7}},
        "correction.kl_clip",
        "{lower: 0.5, upper: 0.7}",
        ["correction.kl_clip.lower=0.8", "correction.kl_clip.upper=1.2"],
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_is_told_and_mended(name: str) -> None:
    given, key, value, overrides = MALFORMED[name]
    problem = malformed(given)
    assert (problem.key, problem.value, list(problem.overrides)) == (key, value, overrides)
    config = with_overrides(OmegaConf.create({"correction": {"proximal": None, **given}}), own_keys_for_us(overrides))
    mended: Any = OmegaConf.to_container(config.correction)
    CorrectionSpec.from_mapping(mended if mended["proximal"] else {k: v for k, v in mended.items() if k != "proximal"})


def test_bounds_that_cross_keep_what_is_beside_the_value() -> None:
    assert str(malformed(masks(lower=2.0))) == (
        f"{MASK}.lower=2.0: above {MASK}.upper=1.01: nothing lies between. Swap the bounds."
    )


def test_a_value_in_quotes_keeps_both() -> None:
    with pytest.raises(SpecError) as caught:
        verl_rejections("seq_mean_k1", None, "")
    problem = told(caught.value)
    assert (problem.key, problem.value) == ("rollout_rs_threshold", "null")
    assert problem.reason == "with rollout_rs='seq_mean_k1': set a threshold for each option, or one for all."


@pytest.mark.parametrize(
    ("sentence", "overrides"),
    [
        ("Set a.b=1 and a.c=2 for example.", ("a.b=1", "a.c=2")),
        ("Set a.b=rollout, a.c=token and a.d=any.", ("a.b=rollout", "a.c=token", "a.d=any")),
        ("Set a.b=1, or a.c=2.", ("a.b=1",)),
        ("Set a.b=null or a.c=2.", ("a.b=null",)),
        ("Set a.b=...", ()),
        ("Rename it.", ()),
    ],
)
def test_what_a_sentence_proposes(sentence: str, overrides: tuple[str, ...]) -> None:
    assert named_overrides(sentence) == overrides


def test_unknown_alarms_and_recording_keys_are_taken_away() -> None:
    config = OmegaConf.create(
        {
            "offpolicy": {"alarms": {"foo": {"action": "stop"}}, "record": {"dri": "x"}},
            "correction": {"weight": None, "masks": {}},
        }
    )
    found = {problem.key: problem.overrides for problem in own_keys(config, CorrectionSpec())}
    assert found["offpolicy.alarms.foo"] == ("~offpolicy.alarms.foo",)
    assert found["offpolicy.record.dri"] == ("~offpolicy.record.dri",)


def test_another_directory_beside_one_that_is_taken(tmp_path: Any) -> None:
    key = "offpolicy.record.dir"
    taken = tmp_path / "run"
    taken.mkdir()
    (tmp_path / "run_2").mkdir()
    assert _problem(key, str(taken), "of another run.", FIX).overrides == (f'{key}="{taken}_3"',)
    assert _problem(key, 5, "not a directory.", f"Set {key}=PATH, or null for no recording.").overrides == (
        f"{key}=null",
    )
    mu = "actor_rollout_ref.rollout.calculate_log_probs=true"
    assert _problem(key, "x", "no mu to record.", f"Set {mu}.").overrides == (mu,)
