"""Sentences about rows that no attribution sees, and verdicts without a share."""

from __future__ import annotations

import math
from dataclasses import replace

from recipe.offpolicy.analysis.attribution.causes.cause import Cause, report_absent, report_untestable
from recipe.offpolicy.analysis.attribution.profiles import Bucket, clear_drift_std
from recipe.offpolicy.analysis.attribution.scored_rows import describe_left_out, describe_none_scored


def test_rows_that_are_left_out_are_counted() -> None:
    assert describe_left_out(0) == ""
    assert describe_left_out(3).startswith("3 rows of later gradient steps are left out")
    assert describe_none_scored(5).startswith("5 rows are recorded, none at the first gradient step")


def test_verdicts_without_a_finding() -> None:
    assert report_absent("numerics", "No.", share=0.1) == Cause("numerics", "absent", {"share": 0.1}, "No.")
    assert report_untestable("numerics", "No rows.").verdict == "not testable"


def test_a_drift_that_is_not_identified_is_no_number() -> None:
    bucket = Bucket("1-2", tokens=3, mean=0.1, std=0.2, k3=0.3, share=1.0, drift_std=0.4)
    (cleared,) = clear_drift_std([bucket])
    assert math.isnan(cleared.drift_std)
    assert replace(cleared, drift_std=0.4) == bucket
