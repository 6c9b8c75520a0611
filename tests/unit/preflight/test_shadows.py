"""Corrections to report on, and what is left of a chosen one."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.preflight.checks.readable import substitute_usual_values
from recipe.offpolicy.preflight.hydra_groups import filter_added, parse_overrides
from recipe.offpolicy.preflight.resolve import parse_shadows, refuse_emptied
from tests.support.corrections import GSM, TIS, opsm, spec

OPTIONS: dict[str, dict[str, Any]] = {
    "gsm": {"masks": {"gsm": GSM}},
    "opsm": {"masks": {"opsm": opsm(0.1) | {"delta": "???"}}},
}


def test_an_open_delta_is_filled_in_and_said() -> None:
    shadows, notes = parse_shadows(["gsm", "opsm"], OPTIONS.__getitem__, 0.2)
    assert shadows == {"gsm": spec(gsm=GSM), "opsm": spec(opsm=opsm(0.2))}
    assert len(notes) == 1
    assert "opsm" in notes[0]


@pytest.mark.parametrize(
    ("names", "delta", "reason"),
    [
        (["gsm", "gsm"], 0.1, "named twice"),
        ([3], 0.1, "no option"),
        (["gsm"], 0, "a number > 0"),
        (["gsm"], True, "> 0"),
    ],
)
def test_what_cannot_be_reported_on(names: list[Any], delta: Any, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        parse_shadows(names, OPTIONS.__getitem__, delta)


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
