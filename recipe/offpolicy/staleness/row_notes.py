"""Notes about rows, kept from one turn to the next by the clients of the rollout servers."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

Note = TypeVar("Note")


class RowNotes(WeakValueDictionary[str, Note], Generic[Note]):
    """Notes of rows whose agent loops still hold the client's result, by request id.

    With verl's ``full_determinism`` different rows have the same request id. An agent loop awaits all turns of its row
    in one asyncio task, so the note is then that of the task.

    Args:
        make: makes the note of a new row.
    """

    def __init__(self, make: Callable[[], Note]) -> None:
        super().__init__()
        self._make = make
        self._of_task: ContextVar[dict[str, Note] | None] = ContextVar("offpolicy_notes", default=None)

    def find(self, request_id: str, *, shared: bool) -> Note:
        """Find or make the note of a row; ``shared``: different rows can have the same request id."""
        if not shared:
            return self.setdefault(request_id, self._make())
        if (own := self._of_task.get()) is None:
            self._of_task.set(own := {})
        return own.setdefault(request_id, self._make())
