"""Problems in words: overrides, what a feature needs, bounds; and numbers that are fetched together."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from recipe.offpolicy.analysis.report.report_page import _describe_spec
from recipe.offpolicy.correction import Reduction, Statistic
from recipe.offpolicy.correction.problem import Requirement, find_unmet, set_to
from recipe.offpolicy.correction.spec import format_bounds
from recipe.offpolicy.correction.statistics import DeferredValue, defer_statistics, fetch
from recipe.offpolicy.preflight.examination import describe_part
from recipe.offpolicy.replay.batch_routes import list_requirements
from recipe.offpolicy.support.support_settings import REQUIREMENTS
from tests.support.presets import PRESETS


@pytest.mark.parametrize(
    "value", [None, True, 2, 0.5, "gsm", "0.5_2", "null", "", "a b", "it's", "${x}", ["a", 1.5], {"k": [1, None]}]
)
def test_hydra_reads_back_what_is_set(value: Any) -> None:
    (override,) = OverridesParser.create().parse_overrides([set_to("correction.x", value)])
    assert override.key_or_group == "correction.x"
    found = override.value()
    # Hydra leaves an escaped interpolation to OmegaConf.
    assert (found.replace("\\$", "$") if isinstance(found, str) else found) == value


def test_a_key_that_may_not_be_there_is_added() -> None:
    assert set_to("offpolicy.x", 1, add=True) == "++offpolicy.x=1"


ROWS = {
    f"{row.key} ({name})": row
    for name, rows in (("R3", list_requirements("R3")), ("support", REQUIREMENTS))
    for row in rows
}


@pytest.mark.parametrize("name", ROWS)
def test_what_a_row_proposes_meets_it(name: str) -> None:
    row = ROWS[name]
    (problem,) = find_unmet([row], {row.key: "other"}.get, "feature=off", ("part",), {"feature": "on"})
    assert (problem.key, problem.parts, problem.alongside) == (row.key, ("part",), {"feature": "on"})
    assert problem.fix.endswith(", or feature=off.")
    assert len(problem.overrides) == 1 + len(row.together)
    for value in (None, *row.wanted):
        assert list(find_unmet([row], {row.key: value}.get, "", ())) == []


def test_further_keys_are_set_with_it() -> None:
    row = Requirement("kl_in_reward", (False,), "it does not fit.", (("kl_loss", True),))
    (problem,) = find_unmet([row], {"kl_in_reward": True}.get, "support=null", ())
    assert problem.overrides == ("kl_in_reward=false", "kl_loss=true")
    assert problem.fix == "Set kl_in_reward=false and kl_loss=true, or support=null."


@pytest.mark.parametrize(
    ("bounds", "shown"),
    [
        ({"lower": 0.99, "upper": 1.01}, "[0.99, 1.01]"),
        ({"lower": None, "upper": 2.0}, "<= 2"),
        ({"upper": 2.0}, "<= 2"),
        ({"lower": 0.9, "upper": None}, ">= 0.9"),
        ({"lower": 0.904837, "upper": None, "delta": 0.1, "budget": None}, "delta=0.1"),
        ({"lower": None, "upper": None, "budget": 0.04}, "budget=0.04"),
        ({"lower": 1 / 1.001, "upper": 1.001}, "[0.999001, 1.001]"),
        ({"lower": 0.99999999, "upper": 1.0000001}, "[0.99999999, 1.0000001]"),
        ({"lower": 1e-4, "upper": 100.0}, "[0.0001, 100]"),
        ({"delta": None}, "not set"),
        ({}, "not set"),
    ],
)
def test_bounds(bounds: dict[str, float | None], shown: str) -> None:
    assert format_bounds(bounds) == shown


def test_no_option_is_described_with_an_open_bracket() -> None:
    """By the doctor and by the report; a bracket has two numbers, and a delta is shown as it was given."""
    for spec in PRESETS.values():
        described = [describe_part(part) for part in [*spec.all_weights.values(), *(mask for _, mask in spec.masks)]]
        described += _describe_spec(spec).values()
        for text in described:
            assert not re.search(r"\[ *,|, *\]|0\.9512|(upper|lower|delta) [0-9]", text), text


def test_readings_are_fetched_together() -> None:
    floats = DeferredValue(torch.tensor([0.1, -0.0], dtype=torch.float64), list)
    # Beyond 2**53, which a float64 would round.
    integers = DeferredValue(torch.tensor([2**53 + 1]), sum)
    assert fetch([floats, integers]) == [[0.1, -0.0], 2**53 + 1]
    assert fetch([]) == []


def test_a_part_that_two_statistics_share_travels_once() -> None:
    count = torch.tensor(4.0, dtype=torch.float64)
    one = Statistic(Reduction.MEAN, (torch.tensor(6.0, dtype=torch.float64), count))
    other = Statistic(Reduction.MEAN, (3.0, count))
    reading = defer_statistics({"one": one, "other": other})
    assert len(reading.numbers) == 2
    (found,) = fetch([reading])
    assert {name: statistic.parts for name, statistic in found.items()} == {"one": (6.0, 4.0), "other": (3.0, 4.0)}
    assert found["one"].value() == 1.5


def test_statistics_in_floats_need_no_transfer() -> None:
    reading = defer_statistics({"one": Statistic(Reduction.SUM, (2.0,))})
    assert len(reading.numbers) == 0
    assert fetch([reading])[0]["one"].value() == 2.0
