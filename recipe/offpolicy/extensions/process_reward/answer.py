"""Ids of the force prompt and the answer after it, tokenised together, and the text of single tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np

COLUMN = "reward_model.ground_truth"
"""Column of the data set that holds the answer."""


class AnswerError(ValueError):
    """An answer cannot be scored; the message says why."""


@dataclass(frozen=True)
class Forced:
    """Ids that follow a prefix.

    Attributes:
        ids: ids of the force prompt with the answer.
        answer: number of last ids that overlap the answer's characters.
    """

    ids: tuple[int, ...]
    answer: tuple[int, ...]


def read_answers(row: Any, most: int) -> list[str]:
    """Read the answers of a row's ``reward_model`` column: an expression as text, a number, or several alternatives.

    Raises:
        AnswerError: there is none, or there are more than ``most``.
    """
    truth: Any = row.get("ground_truth") if hasattr(row, "get") else None
    # numpy's arrays, as read from parquet.
    truth = truth[()] if isinstance(truth, np.ndarray) else truth
    given = list(truth) if isinstance(truth, list | tuple | np.ndarray) else [truth]
    answers = [_write(each) for each in given if each is not None and not isinstance(each, dict)]
    if not answers or not all(answers):
        raise AnswerError(f"the column {COLUMN} holds no answer: {truth!r}.")
    if len(answers) > most:
        raise AnswerError(f"the column {COLUMN} holds {len(answers)} answers, more than max_answers={most}.")
    return answers


def _write(answer: Any) -> str:
    """Write an answer as a response would: numbers without a trailing ".0" or an exponent, texts without outer spaces.

    Raises:
        AnswerError: a number that is not finite.
    """
    if isinstance(answer, float | np.floating | Decimal):
        if not math.isfinite(answer):
            raise AnswerError(f"the column {COLUMN} holds {answer}, which is no answer.")
        if isinstance(answer, Decimal):
            return f"{answer.normalize():f}"
        # A float32 of 0.1 is "0.1", which it would not be as a Python float.
        return np.format_float_positional(answer if answer else 0.0, trim="-")
    return str(answer).strip()


def tokenize_answer(tokenizer: Any, force_prompt: str, answer: str) -> Forced:
    """Tokenise force prompt and answer together: a token such as " 42" also holds the prompt's last space.

    Raises:
        AnswerError: no token holds the answer.
    """
    text = force_prompt + answer
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, ends = list(found["input_ids"]), [end for _, end in found["offset_mapping"]]
    else:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        ends = list(itertools.accumulate(map(len, list_pieces(tokenizer, ids))))
    behind = [place for place, end in enumerate(ends) if end > len(force_prompt)]
    if not behind:
        raise AnswerError(f"no token of {text!r} holds the answer {answer!r}.")
    return Forced(tuple(ids), tuple(ids[behind[0] :]))


def list_pieces(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    """List the text of each token."""
    return [_decode(tokenizer, int(each)) for each in ids]


@lru_cache(maxsize=1 << 18)
def _decode(tokenizer: Any, token: int) -> str:
    text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    # For a single token, sentencepiece's decoder drops the leading space.
    name = tokenizer.convert_ids_to_tokens(token)
    return f" {text}" if isinstance(name, str) and name.startswith("▁") and not text.startswith(" ") else text


def find_unlike_pieces(tokenizer: Any, texts: Sequence[str]) -> str | None:
    """Find the first of ``texts`` whose tokens, decoded one by one, differ from the whole; None: none.

    Only ASCII is compared, because a token may be a part of another character, which is not text by itself.
    """
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if _keep_ascii("".join(list_pieces(tokenizer, ids))) != _keep_ascii(str(whole)):
            return text
    return None


def _keep_ascii(text: str) -> str:
    return text.encode("ascii", "ignore").decode().lstrip()
