"""docs/migrate.md: each row of keys is the same correction on both sides, and the named metrics are equal."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from recipe.offpolicy.analysis.whatif.candidates import compose_correction, initialize_composer
from recipe.offpolicy.correction import CorrectionSpec
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "migrate.md").read_text()
ROWS = re.findall(r"^\| `((?:rollout|bypass)_[^`]*=[^`]*)` \| `([^`]*)` \|$", PAGE, re.M)


def parse(keys: str) -> dict[str, object]:
    """Parse verl's keys; a pair of bounds or names is text."""
    pairs = (each.split("=") for each in keys.split())
    return {key: value if "_" in value else yaml.safe_load(value) for key, value in pairs}


@pytest.mark.parametrize(("keys", "overrides"), ROWS)
def test_a_row_is_the_same_correction(keys: str, overrides: str) -> None:
    """Except for the names of masks, and for pi_old, which verl recomputes where ours may reuse the current policy."""
    wanted = CorrectionSpec.from_verl(parse(keys))
    words = [each.replace("+correction@", "") for each in shlex.split(overrides) if "loss_mode" not in each]
    with initialize_composer():
        found = CorrectionSpec.from_mapping(compose_correction(words))
    assert found.weight == wanted.weight
    assert [mask for _, mask in found.masks] == [mask for _, mask in wanted.masks]
    assert (found.proximal == "bypass") == (wanted.proximal == "bypass")
    assert ("loss_mode=gpg" in overrides) == wanted.weighs_full_ratio
