"""Malformed sections are refused with key, value and an override that mends them."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.extensions.length_penalty.settings import LengthSettings


@pytest.mark.parametrize("kind", ["none", "uniform", "group", "anchor"])
def test_a_kind_is_enough(kind: str) -> None:
    settings = LengthSettings.from_mapping("length_penalty", {"kind": kind, "coefficient": None})
    assert settings.coefficient == {"none": 0.0, "uniform": 1e-4, "group": 0.1, "anchor": 0.01}[kind]
    assert (settings.place, settings.anchor.min_samples, settings.warmup.steps) == ("after", 16, 0)


@pytest.mark.parametrize(
    ("change", "key", "override"),
    [
        ({"kind": "cosine"}, "length_penalty.kind", "length_penalty.kind=anchor"),
        ({"place": "inside"}, "length_penalty.place", "length_penalty.place=after"),
        ({"zero_variance": True}, "length_penalty.zero_variance", "length_penalty.zero_variance=penalise"),
        ({"coefficient": -1}, "length_penalty.coefficient", "length_penalty.coefficient=null"),
        ({"anchor": {"pass_rate": 1.0}}, "length_penalty.anchor.pass_rate", "length_penalty.anchor.pass_rate=0.9"),
        ({"anchor": {"per": "step"}}, "length_penalty.anchor.per", "length_penalty.anchor.per=prompt"),
        ({"anchor": {"pass_rat": 0.8}}, "length_penalty.anchor.pass_rat", "length_penalty.anchor.pass_rate=0.8"),
        ({"warmup": {"steps": -1}}, "length_penalty.warmup.steps", "length_penalty.warmup.steps=0"),
        ({"warmup": 3}, "length_penalty.warmup", "length_penalty.warmup={}"),
        ({"most": 0}, "length_penalty.most", "length_penalty.most=null"),
        ({"reference": "budget"}, "length_penalty.reference", "length_penalty.reference=null"),
        ({"reference": 300}, "length_penalty.reference", "length_penalty.reference=null"),
        ({"kind": "reference"}, "length_penalty.reference", "length_penalty.kind=anchor"),
        ({"coeficient": 3}, "length_penalty.coeficient", "length_penalty.coefficient=3"),
    ],
)
def test_what_cannot_be_meant(change: dict[str, Any], key: str, override: str) -> None:
    with pytest.raises(SpecError) as caught:
        LengthSettings.from_mapping("length_penalty", {"kind": "anchor"} | change)
    assert caught.value.problem.key == key
    assert override in f"{caught.value.problem.overrides} {caught.value.problem.advice}"


def test_a_section_without_a_kind_is_refused() -> None:
    with pytest.raises(SpecError, match="no kind of penalty is named"):
        LengthSettings.from_mapping("length_penalty", {})
