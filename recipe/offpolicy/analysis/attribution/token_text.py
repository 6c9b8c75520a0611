"""Safe text of recorded tokens: by the model's own tokenizer where it is installed, else ids."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...fault_tolerance.redaction import redact_text

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories of control, format, surrogate, private, unassigned and line-separator characters."""

_OPTION = "Give --tokenizer FOLDER, with the model's tokenizer, to see text"


class Tokenizer(Protocol):
    """The method of a transformers tokenizer that is used."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> str: ...


def escape(text: str) -> str:
    """Escape control, format and unassigned characters: a line feed becomes \\n."""
    return "".join(
        character.encode("unicode_escape").decode() if unicodedata.category(character) in _HIDDEN else character
        for character in text
    )


class TokenDecoder:
    """Decoder of recorded token ids to escaped text.

    Args:
        tokenizer: None shows ids.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer

    @property
    def decodes(self) -> bool:
        """True if it shows text, not ids."""
        return self._tokenizer is not None

    def decode(self, ids: Sequence[int]) -> str:
        """Decode to one line; ids where the tokenizer does not know them."""
        ids = [int(token) for token in ids]
        if self._tokenizer is not None and ids:
            try:
                return escape(self._tokenizer.decode(ids, skip_special_tokens=False))
            # Tokenizers raise any of these for ids beyond their vocabulary.
            except (IndexError, KeyError, OverflowError, TypeError, ValueError):
                pass
        return " ".join(map(str, ids))


def load_decoder(card: Mapping[str, Any]) -> tuple[TokenDecoder, str]:
    """Load the decoder of a recording: of the tokenizer that its card names, else of its model.

    Returns:
        The reader, and why it shows ids and how to get text; empty where it shows text. Nothing is fetched from a
        network.
    """
    model = card.get("tokenizer") or card.get("model")
    if not isinstance(model, str) or not model:
        return TokenDecoder(), f"the recording does not name its model. {_OPTION}"
    shown = escape(redact_text(model))
    absent = f"the model is not at {shown}. {_OPTION}"
    there = Path(model).is_dir()
    # A name of Hugging Face's may be in this machine's cache.
    if not there and not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return TokenDecoder(), absent
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return TokenDecoder(), "transformers is not installed. Install it to see text"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    # A model folder may hold anything, and text is not worth failing the analysis for.
    except Exception as error:
        if not there:
            return TokenDecoder(), absent
        return TokenDecoder(), f"{shown} has no readable tokenizer ({type(error).__name__}). {_OPTION}"
    return TokenDecoder(tokenizer), ""
