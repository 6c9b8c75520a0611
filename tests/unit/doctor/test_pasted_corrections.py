"""Fixes of malformed values: what a SpecError tells, and that its overrides, pasted, make a correction."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, Problem, SpecError
from recipe.offpolicy.correction.dialects.verl import read_verl_rejections
from recipe.offpolicy.preflight.checks.staleness import check_own_keys
from recipe.offpolicy.preflight.composed import Composed
from recipe.offpolicy.preflight.hydra_groups import force_own_keys
from recipe.offpolicy.recording.run import find_problems
from tests.support.corrections import GSM, TIS, opsm
from tests.support.mended import with_overrides

WEIGHT = "correction.weight"
MASK = "correction.masks.gsm"


def masks(**changes: Any) -> dict[str, Any]:
    return {"masks": {"gsm": GSM | changes}}


def malformed(mapping: dict[str, Any]) -> Problem:
    with pytest.raises(SpecError) as caught:
        CorrectionSpec.from_mapping(mapping)
    return caught.value.problem


# What is given -> key, value, and overrides that fix it.
MALFORMED: dict[str, tuple[dict[str, Any], str, Any, list[str]]] = {
    "misspelt": (
        {"weight": TIS | {"uper": 3.0}},
        f"{WEIGHT}.uper",
        3.0,
        [f"~{WEIGHT}.uper", f"{WEIGHT}.upper=3.0"],
    ),
    "unknown": ({"weight": TIS | {"zzz": 3.0}}, f"{WEIGHT}.zzz", 3.0, []),
    "a section misspelt": ({"wieght": dict(TIS)}, "correction.wieght", dict(TIS), []),
    "negative cap": ({"weight": TIS | {"upper": -1}}, f"{WEIGHT}.upper", -1.0, [f"{WEIGHT}.upper=2.0"]),
    "negative bound next to another": (masks(lower=-1), f"{MASK}.lower", -1.0, [f"{MASK}.lower=0.99"]),
    "crossed": (masks(lower=2.0), f"{MASK}.lower", 2.0, [f"{MASK}.lower=1.01", f"{MASK}.upper=2.0"]),
    "proximal": ({"proximal": "x"}, "correction.proximal", "x", ["correction.proximal=recompute"]),
    "proximal misspelt": ({"proximal": "bypas"}, "correction.proximal", "bypas", ["correction.proximal=bypass"]),
    "denominator": ({"denominator": "z"}, "correction.denominator", "z", ["correction.denominator=original"]),
    "baseline": ({"baseline": "z"}, "correction.baseline", "z", ["correction.baseline=include"]),
    "delta left open": (
        {"masks": {"gsm": opsm(0.1) | {"delta": "???"}}},
        f"{MASK}.delta",
        "???",
        [f"{MASK}.delta=0.1"],
    ),
    "lower left out": (
        {"weight": {key: value for key, value in TIS.items() if key != "lower"}},
        f"{WEIGHT}.lower",
        "???",
        [f"{WEIGHT}.lower=null"],
    ),
    "a number in quotes": ({"weight": TIS | {"upper": "3"}}, f"{WEIGHT}.upper", "3", [f"{WEIGHT}.upper=3.0"]),
    "infinite": ({"weight": TIS | {"upper": float("inf")}}, f"{WEIGHT}.upper", float("inf"), [f"{WEIGHT}.upper=null"]),
    "truth": ({"weight": TIS | {"normalize": "yes"}}, f"{WEIGHT}.normalize", "yes", [f"{WEIGHT}.normalize=true"]),
    "clip of KL": (
        {"kl_clip": {"lower": 0.5, "upper": 0.7}},
        "correction.kl_clip",
        {"lower": 0.5, "upper": 0.7},
        ["correction.kl_clip.lower=0.8", "correction.kl_clip.upper=1.2"],
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_is_told_and_mended(name: str) -> None:
    given, key, value, overrides = MALFORMED[name]
    problem = malformed(given)
    assert (problem.key, problem.value, list(problem.overrides)) == (key, value, overrides)
    if not overrides:
        return
    config = with_overrides(OmegaConf.create({"correction": {"proximal": None, **given}}), force_own_keys(overrides))
    mended: Any = OmegaConf.to_container(config.correction)
    CorrectionSpec.from_mapping(mended if mended["proximal"] else {k: v for k, v in mended.items() if k != "proximal"})


def test_a_value_in_quotes_keeps_both() -> None:
    with pytest.raises(SpecError) as caught:
        read_verl_rejections("seq_mean_k1", None, "")
    problem = caught.value.problem
    assert (problem.key, problem.value, problem.alongside) == (
        "rollout_rs_threshold",
        None,
        {"rollout_rs": "seq_mean_k1"},
    )
    assert problem.cause == "with rollout_rs=seq_mean_k1: nothing is rejected."


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("a.b=1",), "Set a.b=1."),
        (("++a.b=1", "a.c=2"), "Set a.b=1 and set a.c=2."),
        (("~a.b",), "Remove a.b."),
        (("a.b=0", "~a.b"), "Remove a.b."),  # a null, which Hydra cannot delete
        ((), ""),
    ],
)
def test_overrides_make_the_sentence_where_nobody_wrote_one(overrides: tuple[str, ...], sentence: str) -> None:
    assert Problem("a", None, "wrong.", overrides=overrides).advice == sentence


def test_unknown_keys_move_where_one_is_alike() -> None:
    config = OmegaConf.create(
        {
            "offpolicy": {"alarms": {"foo": {"action": "stop"}}, "record": {"dri": "x"}},
            "correction": {"weight": None, "masks": {}},
        }
    )
    found = {problem.key: problem.overrides for problem in check_own_keys(Composed(config, CorrectionSpec()))}
    assert found["offpolicy.alarms.foo"] == ()
    assert found["offpolicy.record.dri"] == ("~offpolicy.record.dri", "offpolicy.record.dir=x")


def recording(**values: Any) -> dict[str, tuple[str, ...]]:
    """What is proposed for keys of ``offpolicy.record``."""
    config = OmegaConf.create(
        {
            "offpolicy": {"record": values},
            "trainer": {"resume_mode": "disable", "default_local_dir": "none", "save_freq": -1},
            "actor_rollout_ref": {"rollout": {"calculate_log_probs": values.pop("measured", True)}},
        }
    )
    return {problem.key: problem.overrides for problem in find_problems(config)}


def test_another_directory_beside_one_that_is_taken(tmp_path: Any) -> None:
    key, taken = "offpolicy.record.dir", tmp_path / "run"
    taken.mkdir()
    (taken / "run.json").write_text('{"checkpoints": "of another"}')
    (tmp_path / "run_2").mkdir()
    assert recording(dir=str(taken)) == {key: (f'{key}="{taken}_3"',)}
    assert recording(dir=5) == {key: ()}
    assert recording(dir=str(tmp_path / "new"), measured=False) == {
        key: ("actor_rollout_ref.rollout.calculate_log_probs=true",)
    }
