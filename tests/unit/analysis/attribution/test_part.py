"""Parts of an attribution add up: the sums over steps equal the sums over all rows, for every sum and every example."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipe.offpolicy.analysis.attribution import attribution
from recipe.offpolicy.analysis.attribution.attribution import Part, attribute, join_parts, summarize_rows
from recipe.offpolicy.analysis.attribution.decomposition import build_profiles
from recipe.offpolicy.analysis.attribution.recorded_tokens import RowSample
from recipe.offpolicy.recording import Recording, Rows, concatenate
from tests.support.attributed import attribute_rows
from tests.support.recordings import drawn_rows, record, same


def draw(step: int, rows: int = 12) -> Rows:
    versions = step - 1 - np.arange(rows) % 3
    lengths = [4 + row % 5 for row in range(rows)]
    return drawn_rows(lengths, step=step, seed=step, backend=0.1, drift=0.05, oldest_version=versions)


def close(found: object, expected: object) -> bool:
    """Return True if two values have the same fields, with numbers within 1e-12."""
    one, other = vars(found), vars(expected)
    return all(
        one[name] == (pytest.approx(value, rel=1e-12, abs=1e-15) if isinstance(value, float) else value)
        for name, value in other.items()
    )


def assert_alike(found: Part, expected: Part) -> None:
    """Compare everything except the draws."""
    assert (found.rows, found.ages, found.stale) == (expected.rows, expected.ages, expected.stale)
    assert found.sums["recorded"][0] == pytest.approx(expected.sums["recorded"][0])
    for name, buckets in build_profiles(expected.cells).items():
        assert all(map(close, build_profiles(found.cells)[name], buckets))
    for name in ("tokens", "worst"):
        columns = [column for column in getattr(expected, name).columns if column not in ("context", "place")]
        one, other = (getattr(each, name).select(columns).rows() for each in (found, expected))
        assert one == [
            tuple(pytest.approx(value) if isinstance(value, float) else value for value in row) for row in other
        ]


def test_pieces_of_a_step_add_up_to_the_step() -> None:
    """Two ranks have copies of each row: an example counts both, and the sample is that of the whole step."""
    first = draw(5)
    second = replace(first, rank=np.ones(len(first), dtype=np.int32))
    both, sample = concatenate([first, second]), RowSample.of_steps([5], 40)
    whole = summarize_rows(both, (0,), worst=4)
    one, other = (summarize_rows(rows, (i,), worst=4) for i, rows in enumerate((first, second)))
    found = join_parts([one, other], 4)
    assert_alike(found, join_parts([whole], 4))
    assert not np.array_equal(one.sums["recorded"][1:], other.sums["recorded"][1:])
    assert found.worst["count"].to_list() == [2] * 4
    spare = concatenate([sample.take(first, spare=True), sample.take(second, spare=True)])
    assert 0 < len(sample.take(both)) < len(both)
    assert same(sample.take(spare), sample.take(both))


def test_a_large_recording_is_searched_in_part_and_added_up_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [draw(step) for step in (2, 3, 4)]
    recording = Recording(record(tmp_path, *rows))
    whole = attribute(recording)
    assert (whole.searched, whole.rows) == (0, 36)
    assert whole.whole == attribute_rows(concatenate(rows), {}).whole
    monkeypatch.setattr(attribution, "SEARCHED", 60)
    found = attribute(recording)
    assert 0 < found.searched < sum(each.tokens for each in rows) / 2
    assert (found.whole, found.by_step, found.profiles) == (whole.whole, whole.by_step, whole.profiles)
