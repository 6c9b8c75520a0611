"""The table of verl's releases: rows found by version, and the contracts that follow from an attribute."""

from __future__ import annotations

import pytest

from verl_patches import releases
from verl_patches.releases import attributes_of, is_too_old, specifiers


@pytest.mark.parametrize(
    ("version", "row"),
    [
        ("0.7.1", "0.7.1"),
        ("0.6.0", "0.7.1"),
        ("0.9.0rc1", "0.9.0"),
        ("0.99.0.dev0", releases.TESTED[-1]),  # later than 0.9 by its numbers, not by its letters
    ],
)
def test_an_untested_release_is_read_as_the_newest_row_before_it(version: str, row: str) -> None:
    assert attributes_of(version).name == row


def test_only_what_comes_before_the_oldest_release_is_too_old() -> None:
    versions = ["0.6.1", "0.7.0.dev", "0.7.1.dev", "0.7.1", "0.10.0.dev"]
    assert [is_too_old(version) for version in versions] == [True, True, False, False, False]


def test_specifiers_name_the_releases_with_an_attribute() -> None:
    assert specifiers(lambda release: release.legacy_actors) == ("==0.7.1",)
    assert specifiers(lambda release: not release.platforms) == ("==0.7.1", "==0.8.0")
    assert specifiers(lambda release: "separate_async" in release.v1_modes)[0] == "==0.9.1"
