"""Parts of an attribution add up: over steps as over all rows at once, for every sum and every example."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipe.offpolicy.analysis.attribution import attribution
from recipe.offpolicy.analysis.attribution.attribution import (
    Part,
    attribute,
    join_parts,
    summarize_rows,
)
from recipe.offpolicy.analysis.attribution.decomposition import build_profiles, compute_row_sums, resample
from recipe.offpolicy.analysis.attribution.recorded_tokens import RowSample, hash_ids, mix
from recipe.offpolicy.recording import Recording, RecordingError, Rows, concatenate
from tests.support.attributed import attribute_rows
from tests.support.recordings import drawn_rows, record, same


def draw(step: int, rows: int = 12) -> Rows:
    versions = step - 1 - np.arange(rows) % 3
    lengths = [4 + row % 5 for row in range(rows)]
    return drawn_rows(lengths, step=step, seed=step, backend=0.1, drift=0.05, oldest_version=versions)


def close(found: object, expected: object) -> bool:
    """Whether two values have the same fields, numbers within 1e-12."""
    one, other = vars(found), vars(expected)
    return all(
        one[name] == (pytest.approx(value, rel=1e-12, abs=1e-15) if isinstance(value, float) else value)
        for name, value in other.items()
    )


def assert_alike(found: Part, expected: Part) -> None:
    """All but the draws."""
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


def test_parts_of_steps_add_up() -> None:
    """Rows of both at once differ in their step alone, which tells contexts apart."""
    first, second = draw(5), draw(6, rows=7)
    found = join_parts(
        [summarize_rows(first, (0,), worst=4), summarize_rows(second, (1,), worst=4, left_out=3)], worst=4
    )
    both = concatenate([first, second])
    assert_alike(found, summarize_rows(both, (0,), worst=4))
    assert (found.left_out, found.ages) == (3, {0: 7, 1: 6, 2: 6})
    assert len(found.tokens) == len(found.worst) == 4
    assert same(concatenate(found.samples), both)


def test_pieces_of_a_step_add_up_to_the_step() -> None:
    """Of two ranks that hold copies of each row: an example counts both, and the sample is that of the whole step."""
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


def test_a_large_step_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of rows are of each piece, so that intervals alone differ."""
    ranks = [replace(draw(5), rank=np.full(12, rank, dtype=np.int32)) for rank in range(3)]
    recorded = Recording(record(tmp_path, *ranks))
    whole = attribute(recorded)
    monkeypatch.setattr(Recording.in_pieces, "__defaults__", (1,))
    found = attribute(recorded)
    assert found.whole.intervals != whole.whole.intervals
    for name in ("variance", "kl"):
        assert close(getattr(found.whole, name), getattr(whole.whole, name))
    assert (found.rows, found.causes, found.mend_first) == (whole.rows, whole.causes, whole.mend_first)
    assert all(map(close, found.tokens, whole.tokens))


def test_ids_are_hashed_up_to_each_token() -> None:
    """Rows 7 8, 7 8 9, none, and 8 7."""
    found = hash_ids(np.array([7, 8, 7, 8, 9, 8, 7], dtype=np.int32), np.array([0, 2, 5, 5, 7]))
    assert found[0] == mix(np.array([7 << 32], dtype=np.uint64))
    assert found[:2].tolist() == found[2:4].tolist()
    assert len(set(found.tolist())) == 5


def test_draws_of_rows_have_the_spread_of_a_bootstrap() -> None:
    """Each row is drawn once in the mean, with a variance of 1: sums of 400 rows of one token vary by 20."""
    sums = np.zeros((400, *compute_row_sums(drawn_rows([1])).shape[1:]))
    sums[:, 0, 0, 0] = 1.0
    drawn = resample(sums, (0, 1))[1:, 0, 0, 0]
    assert drawn.mean() == pytest.approx(400, abs=3)
    assert drawn.std() == pytest.approx(20, abs=2)
    assert np.array_equal(drawn, resample(sums, (0, 1))[1:, 0, 0, 0])
    assert not np.array_equal(drawn, resample(sums, (0, 2))[1:, 0, 0, 0])


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


def test_rows_of_a_sample_are_those_of_some_prompts() -> None:
    rows = drawn_rows(
        [3] * 8, step=4, group=2, prompt_offsets=np.zeros(9, dtype=np.int64), prompt_ids=np.zeros(0, np.int32)
    )
    assert RowSample().take(rows) is rows
    chosen = RowSample.of_steps([4], 12).take(rows)
    assert len(chosen) == 4
    assert len(set(chosen.uid)) == 2
    assert len(RowSample.of_steps([4], 1).take(rows)) == 2  # one prompt at least
    assert len(RowSample.of_steps([5], 12).take(rows)) == 0


def test_steps_are_chosen_by_their_numbers(tmp_path: Path) -> None:
    recording = Recording(record(tmp_path, *(draw(step) for step in (2, 3, 4))))
    assert recording.choose_steps(None) == [2, 3, 4]
    assert recording.choose_steps((3, None)) == [3, 4]
    with pytest.raises(RecordingError, match="no step from 7 to 9 is recorded; the recorded steps are 2 to 4"):
        recording.choose_steps((7, 9))
    assert recording.only(2, 4).steps == [2, 4]
