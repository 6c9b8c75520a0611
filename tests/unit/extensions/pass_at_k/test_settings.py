"""Malformed sections are refused with key, value and an override that mends them."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.extensions.pass_at_k.settings import PassAtKSettings


def test_defaults_and_schedules() -> None:
    settings = PassAtKSettings.from_mapping("pass_at_k", {"objective": "loo"})
    assert (settings.k, settings.all_k, settings.get_k(99)) == (4, (4,), 4)
    later = PassAtKSettings.from_mapping("pass_at_k", {"objective": "loo", "schedule": [[10, 2], [20, 1]]})
    assert [later.get_k(step) for step in (1, 9, 10, 19, 20, 99)] == [4, 4, 2, 2, 1, 1]
    assert later.all_k == (4, 2, 1)
    whole = PassAtKSettings.from_mapping("pass_at_k", {"objective": "loo", "schedule": [[0, 8], [20, 1]]})
    assert whole.all_k == (8, 1)


@pytest.mark.parametrize(
    ("change", "key", "override"),
    [
        ({"objective": "best"}, "pass_at_k.objective", "pass_at_k.objective=loo"),
        ({"k": 0}, "pass_at_k.k", "pass_at_k.k=4"),
        ({"schedule": [[5, 2], [1, 4]]}, "pass_at_k.schedule", "pass_at_k.schedule=null"),
        ({"schedule": [5, 2]}, "pass_at_k.schedule", "pass_at_k.schedule=null"),
        ({"schedule": [[5, 0]]}, "pass_at_k.schedule", "pass_at_k.schedule=null"),
        ({"metric": {"k": [4, 2]}}, "pass_at_k.metric.k", "pass_at_k.metric.k=[1]"),
        ({"metric": {"extrapolate": 64}}, "pass_at_k.metric.extrapolate", "pass_at_k.metric.extrapolate=[]"),
        ({"dynamic": {"successes": 0}}, "pass_at_k.dynamic.successes", "pass_at_k.dynamic.successes=null"),
        ({"budget": {"mode": "upsampel"}}, "pass_at_k.budget.mode", "pass_at_k.budget.mode=none"),
        ({"budget": {"decay": 2}}, "pass_at_k.budget.decay", "pass_at_k.budget.decay=0.9"),
        ({"budget": {"least": 9, "most": 4}}, "pass_at_k.budget.least", "pass_at_k.budget.least=1"),
        ({"schedul": [[5, 2]]}, "pass_at_k.schedul", "pass_at_k.schedule=[[5, 2]]"),
    ],
)
def test_what_cannot_be_meant(change: dict[str, Any], key: str, override: str) -> None:
    with pytest.raises(SpecError) as caught:
        PassAtKSettings.from_mapping("pass_at_k", {"objective": "loo"} | change)
    assert caught.value.problem.key == key
    assert override in caught.value.problem.overrides


def test_a_section_without_an_objective_is_refused() -> None:
    with pytest.raises(SpecError, match="no objective is named"):
        PassAtKSettings.from_mapping("pass_at_k", {})
