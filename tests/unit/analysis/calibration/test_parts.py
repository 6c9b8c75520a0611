"""Parts whose bounds are calibrated: their names, and the largest bound worth proposing."""

from __future__ import annotations

import math

from recipe.offpolicy.analysis.calibration.calibration_tables import format_part_name
from recipe.offpolicy.analysis.calibration.largest_bounds import check_radius, find_largest_radius
from recipe.offpolicy.analysis.calibration.parts import BoundedPart
from recipe.offpolicy.correction import MaskSpec, WeightSpec
from recipe.offpolicy.correction.ratios import EXP_CLAMP

GSM = MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any")
CAP = WeightSpec("sequence", "truncate", None, 2.0)


def test_the_side_is_named_where_one_of_two_bounds_moves() -> None:
    assert format_part_name(BoundedPart("masks.gsm", GSM, "both")) == "masks.gsm"
    assert format_part_name(BoundedPart("masks.gsm", GSM, "upper")) == "masks.gsm.upper"
    assert format_part_name(BoundedPart("weight", CAP, "upper")) == "weight"


def test_a_bound_beyond_what_related_policies_reach() -> None:
    part = BoundedPart("masks.gsm", GSM, "both")
    assert check_radius(part, math.log(1.01)) == ""
    assert check_radius(part, 5.0).startswith("not identified: it would take a bound at 5 nats")
    # A product over a row may grow as far as ratios are clamped.
    assert find_largest_radius(BoundedPart("weight", CAP, "upper")) == EXP_CLAMP
