"""Tokens as text that is safe to show: with the model's own tokenizer where it is at hand, as ids elsewhere."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...recording.redaction import redacted_text

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode's categories of what would act on a terminal or turn the direction of a line, or is not assigned."""


class Tokenizer(Protocol):
    """What is asked of a tokenizer of transformers."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> str: ...


def escaped(text: str) -> str:
    """``text`` with control, format and unassigned characters as escapes: a line feed is shown as \\n."""
    return "".join(
        character.encode("unicode_escape").decode() if unicodedata.category(character) in _HIDDEN else character
        for character in text
    )


class Reader:
    """Decodes recorded ids.

    Args:
        tokenizer: None shows ids.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer

    @property
    def decodes(self) -> bool:
        """Whether it shows text."""
        return self._tokenizer is not None

    def text(self, ids: Sequence[int]) -> str:
        """One line; ids where the tokenizer does not know them."""
        ids = [int(token) for token in ids]
        if self._tokenizer is not None and ids:
            try:
                return escaped(self._tokenizer.decode(ids, skip_special_tokens=False))
            except (IndexError, KeyError, OverflowError, TypeError, ValueError):
                pass
        return " ".join(map(str, ids))


def reader_of(card: Mapping[str, Any]) -> tuple[Reader, str]:
    """A reader for a recording, by the model on its card.

    Returns:
        The reader, and why it shows ids; empty where it shows text. Nothing is fetched from a network.
    """
    model = card.get("model")
    if not isinstance(model, str) or not model:
        return Reader(), "the recording does not name its model"
    shown = escaped(redacted_text(model))
    if not Path(model).is_dir():
        return Reader(), f"the model is not at {shown}"
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return Reader(), "transformers is not installed"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        return Reader(), f"{shown} has no readable tokenizer ({type(error).__name__})"
    return Reader(tokenizer), ""
