"""A client of verl's rollout servers that records how many tokens each version of the weights sampled.

A synchronisation of the weights aborts every request; verl's client then resends the prompt and the tokens sampled so
far. All tokens of an attempt are therefore sampled by one version, which the server reports with the tokens. verl's
client passes on only the first and the last version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from ..batch.weight_versions import CHUNK_SEALS, CHUNKS, UNKNOWN, Chunk, hash_turn

Note = TypeVar("Note")


class RowNotes(WeakValueDictionary[str, Note], Generic[Note]):
    """Notes of rows, by request id; a note is kept as long as the row's agent loop references the client's result.

    With verl's ``full_determinism``, different rows have the same request id. An agent loop awaits all turns of its row
    in one asyncio task, so in that case notes are kept per task.

    Args:
        make: creates the note of a new row.
    """

    def __init__(self, make: Callable[[], Note]) -> None:
        super().__init__()
        self._make = make
        self._of_task: ContextVar[dict[str, Note] | None] = ContextVar("offpolicy_notes", default=None)

    def find(self, request_id: str, *, shared: bool) -> Note:
        """Find the note of a row, or make one; ``shared``: whether different rows can have the same request id."""
        if not shared:
            return self.setdefault(request_id, self._make())
        if (own := self._of_task.get()) is None:
            self._of_task.set(own := {})
        return own.setdefault(request_id, self._make())


logger = logging.getLogger("verl.offpolicy")


class Turns(list[list[Chunk]]):
    """Chunks of each turn of one row: a list subclass, because plain lists do not support weak references.

    Attributes:
        seals: the hash of each turn, see ``weight_versions.check_chunks``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seals: list[int] = []


_attempts: ContextVar[list[Chunk] | None] = ContextVar("offpolicy_attempts", default=None)
"""Chunks of the current request."""
_rows: RowNotes[Turns] = RowNotes(Turns)
"""This is global because the client is pickled."""


class Attempts(LLMServerClient):
    """Client that records (version, number of tokens) for each attempt that sampled a token."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate in the same way as verl's client."""
        output = await super().generate(*args, **kwargs)
        chunks = _attempts.get()
        if chunks is not None and output.token_ids:
            chunks.append((output.extra_fields.get("global_steps"), len(output.token_ids)))
        return output


class VersionedClient(FullyAsyncLLMServerClient, Attempts):
    """verl's resuming client, whose attempts all pass through ``Attempts``; adds ``CHUNKS`` to ``extra_fields``.

    ``CHUNK_SEALS`` lets the trainer check the chunks. A tool agent keeps the extra fields of its first turn, so later
    turns are added to the lists in those fields.
    """

    shares_ids: bool
    """True if different rows can have the same request id."""

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        """Generate in the same way as verl's client, and add the chunks of the row so far to the output."""
        chunks: list[Chunk] = []
        token = _attempts.set(chunks)
        try:
            output = await super().generate(request_id, **kwargs)
        finally:
            _attempts.reset(token)
        if any(version is None for version, _ in chunks):
            return output
        if (lost := len(output.token_ids) - sum(tokens for _, tokens in chunks)) > 0:
            # These tokens come from an attempt that bypassed Attempts; in a run with a limit, they stop the run.
            chunks.append((UNKNOWN, lost))
        turns = _rows.find(request_id, shared=self.shares_ids)
        if chunks:
            turns.append(chunks)
            turns.seals.append(hash_turn(chunks))
        output.extra_fields |= {CHUNKS: turns, CHUNK_SEALS: turns.seals}
        return output


def note_versions(client: LLMServerClient) -> LLMServerClient:
    """Replace verl's client with a client that records versions; any other client is returned unchanged."""
    if type(client) is not FullyAsyncLLMServerClient:
        logger.warning(
            "the client of the rollout servers is %s: versions of the weights are known only per sequence.",
            type(client).__name__,
        )
        return client
    return convert(client, VersionedClient)


def convert(client: LLMServerClient, kind: type[LLMServerClient]) -> LLMServerClient:
    """Make a client of another class that has the same state, and set ``shares_ids``."""
    made: Any = object.__new__(kind)
    made.__dict__.update(vars(client))
    # The key is read here rather than in each agent loop's process, where the first access to a configuration is slow.
    made.shares_ids = bool(getattr(client.config.actor_rollout_ref.rollout, "full_determinism", False))
    return made
