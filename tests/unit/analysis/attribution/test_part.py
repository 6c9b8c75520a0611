"""Parts of an attribution add up: over steps as over all rows at once, for every sum and every example."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipe.offpolicy.analysis.attribution import attribution
from recipe.offpolicy.analysis.attribution.attribution import attribute, attribute_rows, choose_steps
from recipe.offpolicy.analysis.attribution.decomposition import (
    VersionSums,
    resample,
)
from recipe.offpolicy.analysis.attribution.part import (
    add_by_key,
    add_piece,
    add_profiles,
    choose_sample,
    iterate_bounds,
    merge_copies,
    summarize_block,
    summarize_step,
)
from recipe.offpolicy.analysis.attribution.profiles import build_profiles, select_valid_tokens, sum_profiles
from recipe.offpolicy.analysis.attribution.row_sample import RowSample
from recipe.offpolicy.analysis.attribution.row_sums import compute_row_sums
from recipe.offpolicy.analysis.attribution.token_text import TokenDecoder
from recipe.offpolicy.analysis.attribution.worst_examples import find_worst_rows, find_worst_tokens, hash_context
from recipe.offpolicy.recording import Recording, RecordingError, Rows, concatenate
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


def test_parts_of_steps_add_up_to_the_part_of_all_rows() -> None:
    first, second = draw(5), draw(6, rows=7)
    both, reader = concatenate([first, second]), TokenDecoder()
    part = summarize_step(5, first, reader, worst=4) + summarize_step(6, second, reader, worst=4, left_out=3)
    assert (part.rows, part.left_out, part.tokens) == (19, 3, both.tokens)
    assert part.sums.recorded.sums == pytest.approx(compute_row_sums(both).sum(0))
    tokens = select_valid_tokens(both)
    for name, buckets in build_profiles(sum_profiles(both, tokens)).items():
        for found, expected in zip(build_profiles(part.profiles)[name], buckets, strict=True):
            assert close(found, expected)
    assert {age: found.rows for age, found in part.versions.items()} == {0: 7, 1: 6, 2: 6}
    for found, expected in (
        (part.worst_tokens, find_worst_tokens(both, summarize_block(both).loss, reader, 4)),
        (part.worst_rows, find_worst_rows(both, compute_row_sums(both), reader, 4)),
    ):
        assert len(found) == len(expected) == 4
        assert all(map(close, found.values(), expected))
    assert part.k3 == pytest.approx(sum(summarize_step(s, r, reader, worst=1).k3 for s, r in ((5, first), (6, second))))


def test_pieces_of_a_step_add_up_to_the_step() -> None:
    """Of two ranks that hold copies of each row: an example counts both, and the sample is that of the whole step."""
    first = draw(5)
    second = replace(first, rank=np.ones(len(first), dtype=np.int32))
    both, reader, sample = concatenate([first, second]), TokenDecoder(), RowSample.of_steps([5], 40)
    whole = choose_sample(summarize_step(5, both, reader, worst=4, sample=sample), sample)
    one, other = (
        summarize_step(5, rows, reader, worst=4, sample=sample, piece=i) for i, rows in enumerate((first, second))
    )
    found = choose_sample(add_piece(one, other, sample), sample)
    assert found.sums.recorded.sums == pytest.approx(whole.sums.recorded.sums)
    assert not np.array_equal(one.sums.recorded.draws, other.sums.recorded.draws)
    for name in ("worst_tokens", "worst_rows"):
        assert list(getattr(found, name)) == list(getattr(whole, name))
        assert all(map(close, getattr(found, name).values(), getattr(whole, name).values()))
    assert {each.count for each in found.worst_rows.values()} == {2}
    assert 0 < len(whole.samples[0]) < len(both)
    assert same(found.samples[0], whole.samples[0])


def test_blocks_hold_every_row_once() -> None:
    offsets = np.array([0, 3, 5, 12, 13])
    assert list(iterate_bounds(offsets, 5)) == [(0, 2), (2, 3), (3, 4)]
    assert list(iterate_bounds(offsets, 100)) == [(0, 4)]
    assert list(iterate_bounds(offsets[:1])) == [(0, 0)]


def test_blocks_add_up_to_the_rows() -> None:
    """Of rows with a token that has no finite log-prob: it counts nowhere, and its loss is 0."""
    rows = draw(5)
    log_prob = rows.log_prob.copy()
    log_prob[1] = np.nan
    rows = replace(rows, log_prob=log_prob)
    whole = summarize_block(rows)
    one, other = (summarize_block(rows.between(*bounds)) for bounds in ((0, 5), (5, 12)))
    assert one.tokens + other.tokens == whole.tokens == rows.tokens - 1
    assert np.concatenate([one.sums, other.sums]) == pytest.approx(whole.sums)
    assert np.concatenate([one.loss, other.loss]) == pytest.approx(whole.loss)
    assert whole.loss[1] == 0 < whole.loss[0]
    added = add_profiles(one.profiles, other.profiles)
    for name, sums in whole.profiles.items():
        assert all(close(added[name][value], of_value) for value, of_value in sums.items())
    assert (one.stale, whole.stale) == (True, True)


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


def test_the_larger_of_two_copies_stands_for_both() -> None:
    rows = draw(5)
    (one,) = find_worst_rows(rows, compute_row_sums(rows), TokenDecoder(), 1)
    less = replace(one, k3=one.k3 / 2, share=0.25, count=2)
    merged = merge_copies({b"a": less}, {b"a": one, b"b": less}, key=lambda row: row.k3)
    assert merged == [(b"a", replace(one, share=one.share + 0.25, count=3)), (b"b", less)]


def test_contexts_are_told_apart_by_step_prompt_and_beginning() -> None:
    ids = np.array([7, 8, 7, 9, 7, 8], dtype=np.int32)
    prompts = {"prompt_offsets": np.arange(4), "prompt_ids": np.array([1, 1, 2], dtype=np.int32)}
    rows = drawn_rows([2, 2, 2], response_ids=ids, **prompts)
    assert hash_context(rows, 0, 1) == hash_context(rows, 1, 1) != hash_context(rows, 2, 1)
    assert hash_context(rows, 0) == hash_context(rows, 0, 2) != hash_context(rows, 1)
    assert hash_context(rows, 0) != hash_context(replace(rows, step=rows.step + 1), 0)
    unnamed = drawn_rows(
        [2, 2, 2],
        response_ids=ids,
        uid=np.array(["a", "b", "a"], dtype=object),
        prompt_offsets=np.zeros(4, dtype=np.int64),
        prompt_ids=np.zeros(0, dtype=np.int32),
    )
    assert hash_context(unnamed, 0) == hash_context(unnamed, 2) != hash_context(unnamed, 1)


def test_draws_of_rows_have_the_spread_of_a_bootstrap() -> None:
    """Each row is drawn once in the mean, with a variance of 1: sums of 400 rows of one token vary by 20."""
    sums = np.zeros((400, *compute_row_sums(drawn_rows([1])).shape[1:]))
    sums[:, 0, 0, 0] = 1.0
    drawn = resample(sums, (0, 1)).draws[:, 0, 0, 0]
    assert drawn.mean() == pytest.approx(400, abs=3)
    assert drawn.std() == pytest.approx(20, abs=2)
    assert np.array_equal(drawn, resample(sums, (0, 1)).draws[:, 0, 0, 0])
    assert not np.array_equal(drawn, resample(sums, (0, 2)).draws[:, 0, 0, 0])


def test_sums_of_a_key_that_one_has_stay() -> None:
    one, other = ({0: VersionSums(1, np.ones(2))}, {0: VersionSums(2, np.ones(2)), 3: VersionSums(4, np.zeros(2))})
    found = add_by_key(one, other)
    assert {key: each.rows for key, each in found.items()} == {0: 3, 3: 4}
    assert found[0].sums.tolist() == [2.0, 2.0]


def test_a_large_recording_is_searched_in_part_and_added_up_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [draw(step) for step in (2, 3, 4)]
    recording = Recording(record(tmp_path, *rows))
    whole = attribute(recording)
    assert (whole.searched, whole.rows) == (0, 36)
    assert whole.whole == attribute_rows(concatenate(rows), {}).whole
    monkeypatch.setattr(attribution, "SEARCHED", 60)
    part = attribute(recording)
    assert 0 < part.searched < sum(each.tokens for each in rows) / 2
    assert (part.whole, part.by_step, part.profiles) == (whole.whole, whole.by_step, whole.profiles)


def test_rows_of_a_sample_are_those_of_some_prompts() -> None:
    rows = drawn_rows(
        [3] * 8, step=4, group=2, prompt_offsets=np.zeros(9, dtype=np.int64), prompt_ids=np.zeros(0, np.int32)
    )
    assert RowSample().choose(rows).tolist() == list(range(8))
    chosen = RowSample.of_steps([4], 12).choose(rows)
    assert len(chosen) == 4
    assert len(set(rows.uid[chosen])) == 2
    assert len(RowSample.of_steps([4], 1).choose(rows)) == 2  # one prompt at least
    assert len(RowSample.of_steps([5], 12).choose(rows)) == 0


def test_steps_are_chosen_by_their_numbers(tmp_path: Path) -> None:
    recording = Recording(record(tmp_path, *(draw(step) for step in (2, 3, 4))))
    assert choose_steps(recording, None) == [2, 3, 4]
    assert choose_steps(recording, (3, None)) == [3, 4]
    with pytest.raises(RecordingError, match="no step from 7 to 9 is recorded; there are 2 to 4"):
        choose_steps(recording, (7, 9))
    assert recording.only(2, 4).steps == [2, 4]
