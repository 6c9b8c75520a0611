"""Inputs of rejection fine-tuning: prompts of verl's training data, and tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .rft import RftError


def read_rows(files: Sequence[Path], limit: int | None) -> list[Mapping[str, Any]]:
    """Read rows of verl's training data as plain Python.

    Raises:
        RftError: a file cannot be read, or has no prompts.
    """
    import pyarrow
    import pyarrow.parquet as pq

    rows: list[Mapping[str, Any]] = []
    for file in files:
        try:
            rows += pq.read_table(file).to_pylist()
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise RftError(f"{file} is not a Parquet file: {error}") from error
    rows = rows[:limit]
    if not rows or not all(isinstance(row.get("prompt"), list) and row["prompt"] for row in rows):
        raise RftError(f"{', '.join(map(str, files))}: expected rows with a prompt, a list of messages.")
    return rows


def load_tokenizer(path: str) -> Any:
    """Load a tokenizer.

    Raises:
        RftError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RftError(f"{path} has no tokenizer: {str(error).splitlines()[0]}") from None
