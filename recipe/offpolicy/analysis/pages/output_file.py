"""Checks of output paths, before the work whose result they are to hold."""

from __future__ import annotations

import os
from pathlib import Path

PICTURES = (".png", ".svg", ".pdf")
_KINDS = " or ".join(PICTURES)


class PageError(ValueError):
    """A page or figure cannot be written; the message says why and how to fix it."""


def check_target(option: str, path: Path, example: str) -> None:
    """Raise PageError if no file can be written at the path that an option names.

    Args:
        example: a name of such a file; where it is a picture's, the path has to be one's too.
    """
    if Path(example).suffix in PICTURES and path.suffix.lower() not in PICTURES and not path.is_dir():
        raise PageError(f"{option} {path}: {path.suffix or 'no suffix'} is not a picture format. Name it {_KINDS}.")
    if path.is_dir():
        raise PageError(f"{option} {path}: it is a directory. Name a file, such as {option} {path / example}.")
    if path.exists() and not path.is_file():
        # What is written takes the place of what is there: of a device as well.
        raise PageError(f"{option} {path}: it is no regular file. Name a file, such as {option} {example}.")
    # Missing folders are made when the file is written: the nearest existing one has to allow it.
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise PageError(f"{option} {path}: no file can be written below {above}. Name another place.")
