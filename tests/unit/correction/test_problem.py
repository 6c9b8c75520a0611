"""Overrides that a problem proposes are read by Hydra as the value that is meant."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from recipe.offpolicy.correction.problem import set_to


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
