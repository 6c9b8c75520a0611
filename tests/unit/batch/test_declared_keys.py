"""A declared section: shipped defaults, unknown keys, invalid values, and unused keys."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.batch.declared_keys import Rule, Section, choice, count, flag, number

SHIPPED = {"limit": None, "on": True, "way": "wait", "inner": {"share": 0.5, "times": 2}}
SECTION = Section(
    "a.b",
    SHIPPED,
    {
        "limit": number("a number above 0, or null", above=0, null=True),
        "on": flag(),
        "way": choice("wait", "drop", read_with=("limit", ...)),
        "inner.share": number("a share", 0, 1),
        "inner.times": count("a number of times", read_with=("way", "drop")),
    },
    (Rule("limit", lambda values: values["limit"] == 7, "not with on.", lambda values: 8, "on"),),
    {"limit": 3},
)


def found(**changes: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    config = OmegaConf.create({"a": {"b": SHIPPED | changes}})
    return [(each.key, each.reason, each.overrides) for each in SECTION.find_problems(config)]


@pytest.mark.parametrize(
    ("changes", "key", "reason", "overrides"),
    [
        # What was meant, else the default; where that is null, a value that keeps the key on.
        ({"limit": "2"}, "limit", "expected a number above 0, or null.", ("a.b.limit=2.0",)),
        ({"limit": "x"}, "limit", "expected a number above 0, or null.", ("a.b.limit=3",)),
        ({"limit": 1, "way": "stop"}, "way", "expected one of [wait,drop].", ("a.b.way=wait",)),
        ({"inner": {"share": 2}}, "inner.share", "expected a share.", ("a.b.inner.share=0.5",)),
        ({"limit": 10**400}, "limit", "expected a number above 0, or null.", ("a.b.limit=3",)),
        ({"inner": 2}, "inner", "expected a section with the keys share, times.", ()),
        ({"way": {"wait": 1}}, "way", "expected one of [wait,drop].", ()),
        ({"inner": {"share": {}}}, "inner.share", "expected a share.", ()),
        # A key that is like one of ours is moved; another stays for the user to correct.
        ({"limits": 2}, "limits", "unknown key.", ("~a.b.limits", "a.b.limit=2")),
        ({"inner": {"Share": 0.1}}, "inner.Share", "unknown key.", ("~a.b.inner.Share", "a.b.inner.share=0.1")),
        ({"zzz": 2}, "zzz", "unknown key.", ()),
        # Which of the two keys is meant is for the user to say.
        ({"way": "drop"}, "way", "read only with a.b.limit.", ()),
        ({"inner": {"times": 5}}, "inner.times", "read only with way=drop.", ()),
        ({"limit": 7}, "limit", "not with on.", ("a.b.limit=8",)),
    ],
)
def test_each_problem_is_found_with_what_fixes_it(
    changes: dict[str, Any], key: str, reason: str, overrides: tuple[str, ...]
) -> None:
    assert found(**changes) == [(f"a.b.{key}", reason, overrides)]


def test_what_fits_passes() -> None:
    assert found() == found(limit=2, way="drop", inner={"share": 1, "times": 3}) == []
    assert list(SECTION.find_problems(OmegaConf.create({}))) == []
    (problem,) = SECTION.find_problems(OmegaConf.create({"a": {"b": 3}}))
    assert problem.reason == "expected a section with the keys limit, on, way, inner."
