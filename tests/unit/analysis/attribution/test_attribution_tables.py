"""Tables, page and figure of an attribution, on one of a small recording."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recipe.offpolicy.analysis.attribution.attribution import Attribution
from recipe.offpolicy.analysis.attribution.attribution_page import (
    build_profile_tables,
    format_verdict,
    list_fixes,
)
from recipe.offpolicy.analysis.attribution.cause import Cause
from recipe.offpolicy.analysis.attribution.decomposition import Bucket
from tests.support.attributed import attribute_rows
from tests.support.recordings import drawn_rows


@pytest.fixture(scope="module")
def attribution() -> Attribution:
    return attribute_rows(drawn_rows([3, 4, 5], backend=0.1, drift=0.05), {}, worst=2)


def test_only_causes_that_are_present_have_a_fix(attribution: Attribution) -> None:
    causes = (
        Cause("temperature", "present", {}, "Of 0.9.", "actor_rollout_ref.rollout.temperature=1"),
        Cause("numerics", "absent", {}, "None."),
    )
    found = list_fixes(replace(attribution, causes=causes))
    assert found == ["Fix for temperature: actor_rollout_ref.rollout.temperature=1"]


def test_a_line_for_each_bucket_of_a_profile(attribution: Attribution) -> None:
    bucket = Bucket("1-2", tokens=3, mean=0.1, std=0.2, k3=0.3, share=0.25, drift_std=0.4)
    found = replace(attribution, profiles={"length": [bucket]})
    (table,) = build_profile_tables(found)
    assert build_profile_tables(found, least=1) == []
    assert table.title == "by length"
    assert list(table.rows[0]) == ["1-2", 3, 0.1, 0.2, 0.3, "25.0%", 0.4]


def test_a_sample_that_was_searched_is_said_to_be_one(attribution: Attribution) -> None:
    assert "sample" not in format_verdict(attribution)
    assert format_verdict(replace(attribution, searched=1_000_000)).endswith(
        "Causes were searched for in a sample of 1,000,000 tokens; everything else uses all tokens."
    )
