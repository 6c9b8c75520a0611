"""A byte-level tokenizer with chosen merges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def build_byte_tokenizer(merges: Sequence[tuple[str, str]]) -> Any:
    """Build a byte-level tokenizer with some merges; ids of bytes follow the order of the alphabet."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE(vocab={piece: place for place, piece in enumerate(pieces)}, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)
