"""Pairs of bounds, corrections to report on, and values with which checks and verl cannot compute."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.preflight.checks.readable import find_pairs, find_unreadable_values
from recipe.offpolicy.preflight.resolve import refuse_emptied
from tests.support.corrections import TIS, spec
from tests.support.overridden import with_overrides

VERL = "algorithm.rollout_correction"
UPPER, LOWER = "correction.masks.gsm.upper", "correction.masks.gsm.lower"


@pytest.mark.parametrize(
    ("override", "number", "mends"),
    [
        (f"{UPPER}=0.5_2", 0.52, (f"{LOWER}=0.5", f"{UPPER}=2")),
        # Without a point it is more often a decimal comma than two bounds.
        (f"{UPPER}=1_01", 101.0, (f"{UPPER}=1.01",)),
        ("correction.masks.opsm.delta=0.1_2", 0.12, ("correction.masks.opsm.delta=0.1",)),
        (f"+{VERL}.rollout_is_threshold=0.5_2", 0.52, (f'{VERL}.rollout_is_threshold="0.5_2"',)),
    ],
)
def test_a_pair_is_found_with_what_was_meant(override: str, number: float, mends: tuple[str, ...]) -> None:
    (problem,) = find_pairs([override])
    assert (problem.value, problem.overrides) == (number, mends)


@pytest.mark.parametrize(
    "override",
    [
        f"{UPPER}=0.5_2.0",  # stays a string, which the correction itself refuses
        "offpolicy.record.max_bytes=1_000_000",  # no bound
    ],
)
def test_other_numbers_are_no_pairs(override: str) -> None:
    assert list(find_pairs([override])) == []


def test_the_last_of_two_counts() -> None:
    assert list(find_pairs([f"{UPPER}=0.5_2", f"{UPPER}=2.0"])) == []


def test_a_correction_of_which_nothing_is_left() -> None:
    refuse_emptied(spec(TIS), ["tis_token"])
    refuse_emptied(CorrectionSpec(), ["none"])
    with pytest.raises(SpecError, match="overrides have removed all of its parts"):
        refuse_emptied(CorrectionSpec(), ["tis_token"])


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"data": {"train_batch_size": "many"}}, "data.train_batch_size"),
        ({"data": {"train_batch_size": 0}}, "data.train_batch_size"),
        ({"actor_rollout_ref": {"rollout": {"temperature": "abc"}}}, "actor_rollout_ref.rollout.temperature"),
    ],
)
def test_a_value_of_another_kind_is_named_and_mended(config: dict[str, Any], key: str) -> None:
    wrong = OmegaConf.create(config)
    (problem,) = find_unreadable_values(wrong)
    assert problem.key == key
    assert list(find_unreadable_values(with_overrides(wrong, problem.overrides))) == []
