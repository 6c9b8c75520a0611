"""The cap of a weight that follows an ESS: how it moves, how it is sent, and what is rejected."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.read_parts import read_weight
from recipe.offpolicy.correction.spec import WEIGHT
from recipe.offpolicy.monitor.active_correction import Calibration
from recipe.offpolicy.monitor.bound_settings import find_problems
from recipe.offpolicy.monitor.moving_bounds import Evidence, Histogram, Schedule, find_widest_cap, read_histogram
from recipe.offpolicy.preflight.composed import Composed
from tests.support.cap_cases import CAPPED, SPREAD, config, seen
from tests.support.corrections import GSM, TIS, spec

KEY = "offpolicy.calibrate.target_ess"
SCHEDULE = Schedule(find_widest_cap, target=0.9, side="upper", rate=0.2, floor=0.1, ceiling=10.0, noise_kept=None)
SMALL = [0.0, -3.0] * 10


def cap(made: Calibration) -> float:
    assert made.spec.weight.upper is not None
    return made.spec.weight.upper


def after(log_rho: list[float], times: int = 1, upper: float = 2.0, **changes: Any) -> float:
    """Log of the cap after ``times`` changes on the same evidence."""
    schedule = replace(SCHEDULE, **changes)
    configured = current = read_weight(TIS | {"upper": upper})
    sums = sums_of(log_rho)
    for _ in range(times):
        current = read_weight(
            current.to_mapping() | Evidence(schedule, configured, current, sums).compute_next_bounds()
        )
    return math.log(current.upper or math.nan)


def sums_of(log_rho: list[float], correction: CorrectionSpec = CAPPED) -> Histogram:
    sums = read_histogram(seen(log_rho, correction), WEIGHT)
    assert sums is not None
    return sums


def obstacles(log_rho: list[float]) -> dict[str, str]:
    """The obstacles to a cap with its configured value."""
    weight = read_weight(TIS)
    return Evidence(SCHEDULE, weight, weight, sums_of(log_rho)).find_obstacles()


# The schedule -----------------------------------------------------------------------------------------------


def test_a_change_is_limited_by_the_rate_and_ends_where_the_ess_is_the_target() -> None:
    goal = find_widest_cap(sums_of(SPREAD), 0.9)
    assert goal == pytest.approx(math.log(1.95325), rel=0.037)
    # From a cap of e^1 down by 1.2 a time: 0.833, 0.694, then the edge; and from e^0.5 up.
    start = math.e
    assert [after(SPREAD, n, start) for n in range(1, 5)] == pytest.approx([1 / 1.2, 1 / 1.44, goal, goal])
    assert [after(SPREAD, n, math.exp(0.5)) for n in range(1, 4)] == pytest.approx([0.6, goal, goal])


def test_what_no_cap_evens_takes_it_to_its_floor_and_is_said() -> None:
    assert after(SMALL) == pytest.approx(math.log(2.0) / 1.2)
    assert after(SMALL, 30) == pytest.approx(math.log(2.0) * 0.1)
    found = obstacles(SMALL)
    assert set(found) == {"floor"}
    assert "the lowest allowed cap, 1.072, still yields an ESS below 0.9" in found["floor"]
    assert obstacles(SPREAD) == {}


# The trainer's side -----------------------------------------------------------------------------------------


# How a cap travels ------------------------------------------------------------------------------------------


# Keys -------------------------------------------------------------------------------------------------------


def found(correction: CorrectionSpec, **values: Any) -> list[tuple[str, str]]:
    made = config(correction, **values)
    return [(problem.key, str(problem)) for problem in find_problems(made, Composed(made).spec)]


def skyrl(weight: dict[str, Any]) -> CorrectionSpec:
    return CorrectionSpec.from_mapping({"weight": weight, "skyrl_compat": True})


NAMED = CorrectionSpec.from_mapping({"weight": TIS, "masks": {"weight": GSM}})


@pytest.mark.parametrize(
    ("correction", "values", "expected"),
    [
        (spec(weight=TIS | {"kind": "clip", "lower": 0.5}), {}, ""),
        (spec(gsm=GSM), {}, "correction.weight=null: there is no cap that could move."),
        (spec(weight=TIS | {"kind": "reject"}), {}, "correction.weight.kind=reject drops values beyond its bounds"),
        (spec(weight=TIS | {"upper": 1.0}), {}, "correction.weight.upper=1: a cap is moved by multiplying"),
        (skyrl(TIS | {"level": "sequence"}), {}, "applies masks before a weight of level sequence"),
        (NAMED, {"target_kept": 0.98}, "both metrics would be named offpolicy/calibrate/weight."),
    ],
)
def test_what_cannot_follow_an_ess(correction: CorrectionSpec, values: dict[str, Any], expected: str) -> None:
    messages = found(correction, **values)
    assert [key for key, _ in messages] == [KEY] * bool(expected)
    assert all(expected in message and f"Set {KEY}=null, or " in message for _, message in messages)
