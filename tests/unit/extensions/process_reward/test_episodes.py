"""Episodes of a response, and the answer that is forced after a prefix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.extensions.process_reward.episodes import (
    ScoringError,
    episode_ends,
    find_region,
    find_unlike_pieces,
    read_answers,
    tokenize_answer,
)
from tests.support.byte_tokenizer import build_byte_tokenizer

MARKERS = ["Wait,", "So ", "But "]


def cut(pieces: list[str], ends: list[int]) -> list[str]:
    return ["".join(pieces[a:b]) for a, b in itertools.pairwise([0, *ends])]


@pytest.mark.parametrize(
    ("pieces", "episodes"),
    [
        (["3+3=1. ", "So ", "1+2=3"], ["3+3=1. ", "So 1+2=3"]),
        (["a. ", "W", "ait", ", b"], ["a. ", "Wait, b"]),  # split over tokens
        (["a. Wa", "it, b"], ["a. Wait, b"]),  # the token that holds the first character is the first one
        (["So ", "a"], ["So a"]),  # a boundary at 0 is none
        (["Also", "So ", "x"], ["AlsoSo x"]),  # a letter precedes
        (["éSo ", "a", "。So ", "b"], ["éSo a", "。So b"]),
        (["1", "So ", "So ", "But ", "b"], ["1", "So ", "So ", "But b"]),  # back to back
    ],
)
def test_episodes_begin_at_markers(pieces: list[str], episodes: list[str]) -> None:
    assert cut(pieces, episode_ends(pieces, markers=MARKERS, max_tokens=99)) == episodes


def test_long_episodes_are_split_behind_the_last_sentence_that_fits_or_there() -> None:
    pieces = ["a", ".", " b", ". ", "c", " d", " e", " f", " 3.", "1", "."]
    # "a. b. " fits in five tokens; behind it no sentence ends within five, for "3." goes on with a digit.
    assert episode_ends(pieces, markers=[], max_tokens=5) == [4, 9, 11]
    assert episode_ends(["x"] * 10_000, markers=[], max_tokens=256)[:2] == [256, 512]


@given(
    st.lists(st.sampled_from(["So ", "W", "ait,", "Wait,", " ", ".", "é", "汉", "Also ", "", "x", "7", "\n"])),
    st.integers(1, 5),
    st.none() | st.integers(1, 4),
)
def test_joined_episodes_are_the_response(pieces: list[str], max_tokens: int, max_episodes: int | None) -> None:
    every = episode_ends(pieces, markers=MARKERS, max_tokens=max_tokens)
    ends = episode_ends(pieces, markers=MARKERS, max_tokens=max_tokens, max_episodes=max_episodes)
    for found in (every, ends):
        assert list(itertools.chain(*(pieces[a:b] for a, b in itertools.pairwise([0, *found])))) == pieces
        assert all(a < b for a, b in itertools.pairwise([0, *found]))
    assert all(b - a <= max_tokens for a, b in itertools.pairwise([0, *every]))
    assert set(ends) <= set(every)
    assert len(ends) == (len(every) if max_episodes is None else min(len(every), max_episodes))


def test_the_region_ends_before_the_token_that_begins_the_end_of_thinking() -> None:
    assert find_region(["a", ".</", "think>", "4"], "</think>") == 1
    assert find_region(["</think>"], "</think>") == 0
    assert find_region(["a", "b"], "</think>") == find_region(["a", "b"], "") == 2


# Force prompt and answer are tokenised together, and tokens have a text each


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """ " 4" and " 42" are tokens; the second includes the space that ends a force prompt."""
    return build_byte_tokenizer([("Ġ", "4"), ("Ġ4", "2")])


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


@pytest.mark.parametrize(("answer", "read"), [("42", " 42"), ("7", "7"), ("421", " 421"), ("数", "数")])
def test_the_answers_tokens_are_those_that_overlap_its_characters(tokenizer: Any, answer: str, read: str) -> None:
    ids, count = tokenize_answer(tokenizer, "is ", answer)
    assert text_of(tokenizer, ids) == f"is {answer}"
    assert text_of(tokenizer, ids[-count:]) == read


class Slow:
    """A character tokenizer without offsets, which has the tokens "is " and " 4"."""

    is_fast = False
    names = ("is", " 4", "2")

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        assert text == "is 42"
        return {"input_ids": [0, 1, 2]}

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(self.names[each] for each in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.names[token]


def test_a_tokenizer_without_offsets_is_read_by_the_text_of_its_tokens() -> None:
    assert tokenize_answer(Slow(), "is ", "42") == ([0, 1, 2], 2)


def test_pieces_that_read_otherwise_one_by_one_are_found(tokenizer: Any) -> None:
    """Single bytes of one character are not text, and are left out."""

    class Joining(Slow):
        def decode(self, ids: list[int], **kwargs: Any) -> str:
            return super().decode(ids).replace(" ", "") if len(ids) == 1 else super().decode(ids)

    assert find_unlike_pieces(tokenizer, ["So 42 = 4.2!\n", "Wait,", "数学 42"]) is None
    assert find_unlike_pieces(Joining(), ["is 42"]) == "is 42"


@pytest.mark.parametrize(
    ("truth", "answers"),
    [
        # As a parquet column of doubles and of floats has them.
        (18.0, ["18"]),
        (1e-7, ["0.0000001"]),
        (np.float32(0.1), ["0.1"]),
        (np.array([0.1, 18], dtype=np.float32), ["0.1", "18"]),
        (Decimal("18.00"), ["18"]),
        (" \\frac{x^2}{2}\n", ["\\frac{x^2}{2}"]),
    ],
)
def test_ground_truth_is_one_answer_or_alternatives(truth: Any, answers: list[str]) -> None:
    assert read_answers({"ground_truth": truth}, 2) == answers


@pytest.mark.parametrize("truth", [np.float32("nan"), [1.0, -math.inf]])
def test_a_number_that_is_not_finite_is_no_answer(truth: Any) -> None:
    with pytest.raises(ScoringError, match="which is not an answer"):
        read_answers({"ground_truth": truth}, 2)
