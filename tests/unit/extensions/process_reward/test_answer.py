"""Force prompt and answer are tokenised together, and tokens have a text each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.extensions.process_reward.episodes import (
    AnswerError,
    Forced,
    find_unlike_pieces,
    read_answers,
    tokenize_answer,
)
from tests.support.byte_tokenizer import build_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """ " 4" and " 42" are tokens: the second swallows the space that ends a force prompt."""
    return build_byte_tokenizer([("Ġ", "4"), ("Ġ4", "2")])


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


@pytest.mark.parametrize(("answer", "read"), [("42", " 42"), ("7", "7"), ("421", " 421"), ("数", "数")])
def test_the_answers_tokens_are_those_that_overlap_its_characters(tokenizer: Any, answer: str, read: str) -> None:
    forced = tokenize_answer(tokenizer, "is ", answer)
    assert text_of(tokenizer, forced.ids) == f"is {answer}"
    assert text_of(tokenizer, forced.ids[-forced.answer :]) == read


class Slow:
    """A tokenizer without offsets, of characters, but for "is " and " 4"."""

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
    assert tokenize_answer(Slow(), "is ", "42") == Forced([0, 1, 2], 2)


def test_pieces_that_read_otherwise_one_by_one_are_found(tokenizer: Any) -> None:
    """Bytes of one character are no text by themselves, and are left out."""

    class Joining(Slow):
        def decode(self, ids: list[int], **kwargs: Any) -> str:
            return super().decode(ids).replace(" ", "") if len(ids) == 1 else super().decode(ids)

    assert find_unlike_pieces(tokenizer, ["So 42 = 4.2!\n", "Wait,", "数学 42"]) is None
    assert find_unlike_pieces(Joining(), ["is 42"]) == "is 42"


@pytest.mark.parametrize(
    ("truth", "answers"),
    [
        ("4", ["4"]),
        (4, ["4"]),
        (np.array(["4"], dtype=object), ["4"]),
        # As a parquet column of doubles and of floats has them.
        (18.0, ["18"]),
        (1e-7, ["0.0000001"]),
        (1e22, ["10000000000000000000000"]),
        (np.float32(0.1), ["0.1"]),
        (np.array([0.1, 18], dtype=np.float32), ["0.1", "18"]),
        (np.int64(7), ["7"]),
        (Decimal("18.00"), ["18"]),
        (Fraction(1, 2), ["1/2"]),
        (" \\frac{x^2}{2}\n", ["\\frac{x^2}{2}"]),
        ([0.5, "\\frac{1}{2}"], ["0.5", "\\frac{1}{2}"]),
    ],
)
def test_ground_truth_is_one_answer_or_alternatives(truth: Any, answers: list[str]) -> None:
    assert read_answers({"ground_truth": truth}, 2) == answers


@pytest.mark.parametrize("truth", [np.float32("nan"), [1.0, -math.inf]])
def test_a_number_that_is_not_finite_is_no_answer(truth: Any) -> None:
    with pytest.raises(AnswerError, match="which is not an answer"):
        read_answers({"ground_truth": truth}, 2)


@pytest.mark.parametrize("row", [None, {"ground_truth": ""}, {"ground_truth": []}])
def test_a_missing_answer_names_the_column(row: Any) -> None:
    with pytest.raises(AnswerError, match=r"reward_model\.ground_truth holds no answer"):
        read_answers(row, 4)
