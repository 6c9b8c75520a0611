"""Masks on the age of the weights, and bounds that go by it: by hand, and what cannot be meant."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage
from recipe.offpolicy.correction.spec import compute_fingerprint
from tests.support.corrections import GSM, TIS, band, opsm, spec
from tests.support.refusals import refused

STALE: dict[str, Any] = {"aggregate": "staleness", "level": "token", "upper": 4}
ONE = torch.ones(1, 1)


def keep(correction: CorrectionSpec, ages: list[list[int]] | list[int], *, log_ratio: Any = 0.0, **more: Any) -> Any:
    """What is kept of rows of two turns, whose log(pi_old / mu) is ``log_ratio``, under an advantage of 1."""
    staleness = torch.tensor(ages)
    shape = staleness.shape if staleness.dim() == 2 else (len(ages), 2)
    old = torch.as_tensor(log_ratio, dtype=torch.float64).expand(shape)
    advantages = more.pop("advantages", torch.ones(shape))
    stage = rollout_stage(
        correction,
        old_log_prob=old,
        rollout_log_prob=torch.zeros(shape).double(),
        response_mask=more.pop("mask", torch.ones(shape)),
        staleness=staleness,
        **more,
    )
    return step_stage(correction, stage, log_prob=old, advantages=advantages)


def test_a_bound_by_age_widens_in_log_space() -> None:
    """[1, 2] with 1.01: exp(2 log 1.01) is kept from age 1 on, and at age 0 only 1.01 is."""
    correction = spec(narrow=band(0.5, 1.01, level="token", aggregate="product", by_staleness=[1, 2]))
    twice = 2 * math.log(1.01)
    assert keep(correction, [[0, 1, 2, 1]], log_ratio=[[twice, twice, twice, twice + 1e-6]]).keep.tolist() == [
        [False, True, True, False]
    ]
    assert keep(correction, [[0, 1]], log_ratio=[[twice / 2, -2 * math.log(2)]]).keep.tolist() == [[True, True]]


def test_ages_that_are_not_known_are_not_guessed() -> None:
    for correction in (spec(stale=STALE), spec(TIS | {"by_staleness": [1.0, 2.0]})):
        with pytest.raises(ValueError, match="the age of the weights is needed but unknown"):
            rollout_stage(correction, old_log_prob=ONE, rollout_log_prob=ONE, response_mask=ONE)


@pytest.mark.parametrize(
    "correction",
    [
        spec(stale=STALE),
        spec(stale={**STALE, "when": "negative", "sign": "token", "level": "version"}),
        spec(TIS | {"by_staleness": [1, 2]}, opsm=opsm(0.1, by_staleness=[0.5])),
    ],
)
def test_it_is_read_back_as_it_was_written(correction: CorrectionSpec) -> None:
    assert CorrectionSpec.from_mapping(correction.to_mapping()) == correction
    assert pickle.loads(pickle.dumps(correction)) == correction
    assert correction.age_parts


def test_bounds_of_one_width_are_written_as_before() -> None:
    """So that fingerprints in checkpoints and recordings hold."""
    plain = spec(TIS, gsm=GSM)
    assert "by_staleness" not in str(plain.to_mapping())
    assert spec(TIS | {"by_staleness": None}, gsm=GSM | {"by_staleness": None}) == plain
    widened = spec(TIS | {"by_staleness": [1.0, 2.0]}, gsm=GSM)
    assert len({compute_fingerprint(each, ["gsm"]) for each in (plain, widened)}) == 2
    assert not plain.age_parts


@pytest.mark.parametrize(
    ("key", "value"),
    [("ratio", "rollout"), ("lower", 0), ("lower", None), ("delta", 0.1), ("budget", 0.1), ("by_staleness", [1.0])],
)
def test_what_means_nothing_for_an_age_is_refused(key: str, value: Any) -> None:
    mapping = {"masks": {"stale": STALE | {key: value}}}
    refused(
        mapping, f"correction.masks.stale.{key}=", "Only upper bounds an age", f"emove correction.masks.stale.{key}"
    )


@pytest.mark.parametrize("upper", [-1, 2.5, None, "4", True, math.nan, "???"])
def test_an_age_is_a_whole_number(upper: Any) -> None:
    refused(
        {"masks": {"stale": STALE | {"upper": upper}}},
        "correction.masks.stale.upper=",
        "Set correction.masks.stale.upper=4",
    )


def test_an_age_that_is_not_bounded_is_refused() -> None:
    message = refused(
        {"masks": {"stale": {"aggregate": "staleness", "level": "token"}}}, "correction.masks.stale.upper"
    )
    assert "null" not in message
    refused({"masks": {"stale": {"aggregate": "staleness", "upper": 4}}}, "correction.masks.stale", "level")
    refused({"masks": {"stale": STALE | {"uper": 4}}}, "unknown key")


@pytest.mark.parametrize(
    "factors", [[], 1.0, "1.0", [0.0], [-1.0], [math.inf], [math.nan], [True], ["1"], [None], {}, [10**400]]
)
def test_factors_are_positive_numbers(factors: Any) -> None:
    said = ("list of positive finite numbers", "Set correction.weight.by_staleness=[1.0,1.5,2.0]")
    refused({"weight": TIS | {"by_staleness": factors}}, "correction.weight.by_staleness=", *said)
    refused({"masks": {"gsm": GSM | {"by_staleness": factors}}}, "correction.masks.gsm.by_staleness=", said[0])


@pytest.mark.parametrize("aggregate", ["k1_mean", "k3_sum", "tv_max", "binary_tv"])
def test_bounds_that_are_no_ratios_have_no_log(aggregate: str) -> None:
    mask = band(None, 0.1, aggregate=aggregate, by_staleness=[1.0, 2.0])
    refused({"masks": {"far": mask}}, "correction.masks.far.by_staleness=[1.0,2.0]", "no log to multiply", "null")


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        ({"upper": None}, "no bound to multiply"),
        ({"upper": math.exp(15), "by_staleness": [1.0, 1.5]}, "beyond the +-20 nats"),
    ],
)
def test_a_weight_has_a_bound_left_at_each_age(weight: dict[str, Any], reason: str) -> None:
    refused({"weight": TIS | {"by_staleness": [1.0]} | weight}, "correction.weight.by_staleness=", reason)


FULL = opsm(0.1, by_staleness=[1.0, 2.0])


def test_beside_bypass_the_base_loss_has_one_clip_for_every_age() -> None:
    message = refused({"masks": {"opsm": FULL}, "proximal": "bypass"}, "correction.masks.opsm.by_staleness=[1.0,2.0]")
    assert "with correction.proximal=bypass: pi_old is mu" in message
    assert CorrectionSpec.from_mapping({"masks": {"stale": STALE}, "proximal": "bypass"}).masks
    for proximal, alpha in (("reuse", None), ("loglinear", 0.5)):
        assert CorrectionSpec.from_mapping({"masks": {"opsm": FULL}, "proximal": proximal, "alpha": alpha}).masks


@pytest.mark.parametrize("part", [{"weight": TIS | {"by_staleness": [1.0]}}, {"masks": {"stale": STALE}}])
def test_skyrl_has_no_ages(part: dict[str, Any]) -> None:
    refused(
        {"masks": {"gsm": GSM}} | part | {"skyrl_compat": True}, "correction.skyrl_compat=true", "SkyRL has no such"
    )
