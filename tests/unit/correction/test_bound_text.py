"""One notation for bounds, wherever they are printed."""

from __future__ import annotations

import re

import pytest

from recipe.offpolicy.analysis.report.report_page import _describe_spec
from recipe.offpolicy.correction.bound_text import format_bounds
from recipe.offpolicy.preflight.configured_parts import _describe_mask, _describe_weight
from tests.support.presets import PRESETS


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
        described = [*map(_describe_weight, spec.all_weights.values())]
        described += [_describe_mask(mask) for _, mask in spec.masks]
        described += _describe_spec(spec).values()
        for text in described:
            assert not re.search(r"\[ *,|, *\]|0\.9512|(upper|lower|delta) [0-9]", text), text
