"""The JSON file of an extension's state in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_state(folder: Path, name: str, state: Any) -> None:
    """Write a state that JSON can hold."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(state))


def read_state(folder: Path, name: str, section: str, content: str) -> Any:
    """Read a state.

    Args:
        section, content: of the extension and of the file, for the error.

    Raises:
        FileNotFoundError: the checkpoint notes the state, and has no such file.
    """
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{section}: the checkpoint notes {content}, and {path} is not there. "
            f"Fix: restore the file, or resume another checkpoint."
        )
    return json.loads(path.read_text())
