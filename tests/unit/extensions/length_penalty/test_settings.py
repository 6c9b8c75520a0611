"""What the section leaves out is as the option ships it."""

from __future__ import annotations

import pytest

from recipe.offpolicy.extensions.length_penalty.settings import LengthSettings


@pytest.mark.parametrize("kind", ["none", "uniform", "group", "anchor"])
def test_a_kind_is_enough(kind: str) -> None:
    settings = LengthSettings.from_mapping("length_penalty", {"kind": kind, "coefficient": None})
    assert settings.coefficient == {"none": 0.0, "uniform": 1e-4, "group": 0.1, "anchor": 0.01}[kind]
    assert (settings.place, settings.anchor.min_samples, settings.warmup.steps) == ("after", 16, 0)
