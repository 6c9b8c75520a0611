"""The JSON file of an extension's state in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..fault_tolerance.state_schema import CheckpointError, read_json


def write_state(folder: Path, name: str, state: Any) -> None:
    """Write a JSON-serialisable state."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(state))


def read_state(folder: Path, name: str, section: str, content: str, schema: Any) -> Any:
    """Read a state.

    Args:
        section, content: name of the extension and content of the file, for the error.
        schema: schema of the file, see ``fault_tolerance.state_schema``.

    Raises:
        CheckpointError: the checkpoint records the state, but the file is missing or invalid.
    """
    path = folder / name
    try:
        return read_json(path, schema)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{section}: the checkpoint records {content}, but {path} is missing. "
            f"Fix: restore the file, or resume another checkpoint."
        ) from error
