"""Two bounds that Hydra reads as one number."""

from __future__ import annotations

import pytest

from recipe.offpolicy.preflight.bound_pairs import find_pairs

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
        f"{UPPER}='0.5_2'",
        "offpolicy.record.max_bytes=1_000_000",  # no bound
        "data.upper=0.5_2",  # not ours
    ],
)
def test_other_numbers_are_no_pairs(override: str) -> None:
    assert list(find_pairs([override])) == []


def test_the_last_of_two_counts() -> None:
    assert list(find_pairs([f"{UPPER}=0.5_2", f"{UPPER}=2.0"])) == []
