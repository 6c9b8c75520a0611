"""Corrections to report on, and what is left of a chosen one."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.preflight.checks.readable import substitute_usual_values
from recipe.offpolicy.preflight.hydra_groups import filter_added, parse_overrides
from recipe.offpolicy.preflight.resolve import refuse_emptied
from tests.support.corrections import TIS, spec


def test_a_correction_of_which_nothing_is_left() -> None:
    refuse_emptied(spec(TIS), ["tis_token"])
    refuse_emptied(CorrectionSpec(), ["none"])
    with pytest.raises(SpecError, match="nothing is left of it"):
        refuse_emptied(CorrectionSpec(), ["tis_token"])


def test_unreadable_values_are_replaced_in_a_copy() -> None:
    config = OmegaConf.create({"data": {"train_batch_size": "many"}, "other": "x"})
    changed = substitute_usual_values(config, ["data.train_batch_size", "other"])
    assert changed == {"data": {"train_batch_size": 1024}, "other": None}
    assert config.data.train_batch_size == "many"


def test_overrides_that_may_add_a_key() -> None:
    assert filter_added(["a=1", "+b=1", "++c=1", "~d"]) == ["+b=1", "++c=1"]
    assert [override.key_or_group for override in parse_overrides(["a.b=1", "~c"])] == ["a.b", "c"]
