"""Episodes of a response: at markers, split at sentences, joined evenly; concatenated they are the response."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.extensions.process_reward.episodes import episode_ends, find_region

MARKERS = ["Wait,", "So ", "But "]


def cut(pieces: list[str], ends: list[int]) -> list[str]:
    return ["".join(pieces[a:b]) for a, b in itertools.pairwise([0, *ends])]


@pytest.mark.parametrize(
    ("pieces", "episodes"),
    [
        (["3+3=1. ", "So ", "1+2=3"], ["3+3=1. ", "So 1+2=3"]),
        (["a. ", "W", "ait", ", b"], ["a. ", "Wait, b"]),  # split over tokens
        (["a. Wa", "it, b"], ["a. Wait, b"]),  # the token that holds the first character is the first one
        (["x", " a. Wa", "it, b"], ["x", " a. Wait, b"]),
        (["So ", "a"], ["So a"]),  # a boundary at 0 is none
        (["Also", "So ", "x"], ["AlsoSo x"]),  # a letter precedes
        (["éSo ", "a", "。So ", "b"], ["éSo a", "。So b"]),
        (["1", "So ", "So ", "But ", "b"], ["1", "So ", "So ", "But b"]),  # back to back
        (["a ", "", "So ", ""], ["a ", "So "]),
    ],
)
def test_episodes_begin_at_markers(pieces: list[str], episodes: list[str]) -> None:
    assert cut(pieces, episode_ends(pieces, markers=MARKERS, max_tokens=99)) == episodes


def test_long_episodes_are_split_behind_the_last_sentence_that_fits_or_there() -> None:
    pieces = ["a", ".", " b", ". ", "c", " d", " e", " f", " 3.", "1", "."]
    # "a. b. " fits in five tokens; behind it no sentence ends within five, for "3." goes on with a digit.
    assert episode_ends(pieces, markers=[], max_tokens=5) == [4, 9, 11]
    assert episode_ends(["x"] * 10_000, markers=[], max_tokens=256)[:2] == [256, 512]


def test_of_more_episodes_neighbours_are_joined_and_the_first_and_the_last_end_stay() -> None:
    assert episode_ends(["x"] * 9, markers=[], max_tokens=1, max_episodes=3) == [1, 5, 9]
    assert episode_ends(["x"] * 9, markers=[], max_tokens=1, max_episodes=1) == [9]
    assert episode_ends(["x"] * 9, markers=[], max_tokens=3, max_episodes=3) == [3, 6, 9]


@given(
    st.lists(st.sampled_from(["So ", "W", "ait,", "Wait,", " ", ".", "é", "汉", "Also ", "", "x", "7", "\n"])),
    st.integers(1, 5),
    st.none() | st.integers(1, 4),
)
def test_concatenated_episodes_are_the_response_and_none_is_too_long(
    pieces: list[str], max_tokens: int, max_episodes: int | None
) -> None:
    every = episode_ends(pieces, markers=MARKERS, max_tokens=max_tokens)
    ends = episode_ends(pieces, markers=MARKERS, max_tokens=max_tokens, max_episodes=max_episodes)
    for found in (every, ends):
        assert list(itertools.chain(*(pieces[a:b] for a, b in itertools.pairwise([0, *found])))) == pieces
        assert all(a < b for a, b in itertools.pairwise([0, *found]))
    assert all(b - a <= max_tokens for a, b in itertools.pairwise([0, *every]))
    assert set(ends) <= set(every)
    assert len(ends) == (len(every) if max_episodes is None else min(len(every), max_episodes))


def test_limits_below_1_and_empty_markers_are_refused() -> None:
    for asked in ({"max_tokens": 0}, {"max_tokens": 1, "max_episodes": 0}, {"max_tokens": 1, "markers": [""]}):
        with pytest.raises(ValueError, match=r"1 or more|empty marker"):
            episode_ends(["a"], **({"markers": MARKERS} | asked))  # type: ignore[arg-type]


def test_the_region_ends_before_the_token_that_begins_the_end_of_thinking() -> None:
    assert find_region(["a", ".</", "think>", "4"], "</think>") == 1
    assert find_region(["</think>"], "</think>") == 0
    assert find_region(["a", "b"], "</think>") == find_region(["a", "b"], "") == 2
