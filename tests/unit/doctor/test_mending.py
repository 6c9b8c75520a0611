"""For every malformed correction, pasting the proposed fix leads to a valid correction."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, Problem, SpecError
from recipe.offpolicy.correction.masks import AGGREGATES, MaskSpec, Ratio
from recipe.offpolicy.correction.units import MaskWhen as When
from recipe.offpolicy.correction.units import Sign
from recipe.offpolicy.correction.weights import WeightSpec
from recipe.offpolicy.preflight.hydra_groups import force_own_keys
from tests.support.corrections import GSM, TIS
from tests.support.examples import at_most
from tests.support.overridden import with_overrides

MOST_PASTES = 12
SIGNED = TIS | {"when": "negative"}
VALUES = st.sampled_from([None, "???", "x", True, -1.0, 0, 0.3, 0.99, 1, 1.01, 2.0, 50.0, 1e30, float("inf"), "0.5"])


def refused(mapping: dict[str, Any]) -> Problem | None:
    try:
        CorrectionSpec.from_mapping(mapping)
    except SpecError as error:
        return error.problem
    return None


PARTS = ("weight", "penalty", "kl_clip", "kl_weight")


def count_parts(mapping: dict[str, Any]) -> int:
    """Count the parts of a correction."""
    single = [mapping[name] for name in PARTS if mapping.get(name) not in (None, False)]
    return len(single) + sum(len(mapping.get(name) or ()) for name in ("masks", "weights"))


def mended(mapping: dict[str, Any]) -> tuple[CorrectionSpec | None, int]:
    """Return the correction after pasting the proposals of successive errors; None if an error proposes nothing.

    No paste may remove a part.
    """
    config = OmegaConf.create({"correction": mapping})
    for pastes in range(MOST_PASTES):
        plain: Any = OmegaConf.to_container(config.correction)
        if (problem := refused(plain)) is None:
            return CorrectionSpec.from_mapping(plain), pastes
        if not problem.overrides:
            return None, pastes
        config = with_overrides(config, force_own_keys(problem.overrides))
        left: Any = OmegaConf.to_container(config.correction)
        assert repr(left) != repr(plain), f"{problem}: {problem.pasted} changes nothing"
        assert count_parts(left) == count_parts(plain), f"{problem}: {problem.pasted} takes away what was asked for"
    raise AssertionError(f"still malformed after {MOST_PASTES} pastes: {OmegaConf.to_container(config)}")


def without(mapping: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name not in names}


def mask(**changes: Any) -> dict[str, Any]:
    return {"masks": {"it": GSM | changes}}


# What is malformed, and of it what one paste makes.
ONE_PASTE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a difference of probabilities beyond 1": (
        mask(aggregate="binary_tv", level="token", lower=-0.2, upper=3.0),
        {"masks.it.lower": -0.2, "masks.it.upper": 0.2},
    ),
    "a level that there is not": (mask(level="sequnce"), {"masks.it.level": "sequence"}),
    "a clip of one bound": ({"weight": TIS | {"kind": "clip", "lower": None}}, {"weight.kind": "truncate"}),
    "an infinite cap": ({"weight": TIS | {"upper": math.inf}}, {"weight.upper": None}),
    "a misspelt key": ({"weight": TIS | {"uper": 3.0}}, {"weight.upper": 3.0}),
}


@pytest.mark.parametrize("name", ONE_PASTE)
def test_one_paste_mends(name: str) -> None:
    given_, expected = ONE_PASTE[name]
    spec, pastes = mended(given_)
    assert pastes == 1
    made = OmegaConf.create(spec.to_mapping())
    assert {key: OmegaConf.select(made, key) for key in expected} == expected


@pytest.mark.parametrize(
    "mapping",
    [
        {"weight": TIS, "weights": {"a": SIGNED}},
        {"weights": {"a": SIGNED, "b": SIGNED}},
        {"kl_weight": {"ratio": "ppo", "upper": None}, "kl_clip": {"lower": 0.8, "upper": 1.2}},
        {"weight": TIS | {"zzz": 3.0}},
    ],
)
def test_nothing_is_proposed_where_it_would_take_away_what_was_asked_for(mapping: dict[str, Any]) -> None:
    problem = refused(mapping)
    assert problem.overrides == ()


def _options(kind: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([*kind.__args__, "zzz", "???", None])


# What decides together has no default: a correction without a level is refused, and nothing is proposed.
LEVELS = {"level": st.sampled_from(["token", "sequence", "turn", "version", "tokn"])}
MASKS = st.fixed_dictionaries(
    LEVELS,
    optional={
        "ratio": _options(Ratio),
        "aggregate": st.sampled_from(sorted(AGGREGATES)),
        "when": _options(When),
        "sign": _options(Sign),
        "lower": VALUES,
        "upper": VALUES,
        "delta": VALUES,
        "budget": VALUES,
        "uper": VALUES.filter(lambda value: value != "???"),
    },
)
OF_WEIGHT = st.fixed_dictionaries(
    LEVELS,
    optional={
        "kind": st.sampled_from(["truncate", "clip", "reject", "cilp", "???"]),
        "aggregate": st.sampled_from(["product", "geometric", "k1_sum"]),
        "ratio": _options(Ratio),
        "normalize": st.sampled_from([True, False, "yes", None]),
        "lower": VALUES,
        "upper": VALUES,
        "kidn": VALUES.filter(lambda value: value != "???"),
    },
)


@pytest.mark.parametrize("mapping", [{"weight": without(TIS, "level")}, {"masks": {"it": without(GSM, "level")}}])
def test_a_level_is_not_guessed(mapping: dict[str, Any]) -> None:
    problem = refused(mapping)
    assert problem.overrides == ()
    assert problem.fix.endswith(".level=token, sequence, turn, version or prefix.")


@settings(max_examples=at_most(400))
@given(one=MASKS)
def test_any_mask_is_mended(one: dict[str, Any]) -> None:
    spec, _ = mended({"masks": {"it": one}})
    assert spec is None or isinstance(dict(spec.masks)["it"], MaskSpec)


@settings(max_examples=at_most(300))
@given(weight=OF_WEIGHT)
def test_any_weight_is_mended(weight: dict[str, Any]) -> None:
    spec, _ = mended({"weight": weight})
    assert spec is None or isinstance(spec.weight, WeightSpec)
