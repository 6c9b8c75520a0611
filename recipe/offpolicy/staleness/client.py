"""Clients of verl's rollout servers that record, for each row, the information that the servers return with its tokens.

Each synchronisation of the weights aborts all requests; verl's client then resends the prompt together with the tokens
sampled so far. All tokens of one attempt are therefore sampled by the same version, which the server returns with the
tokens. verl's client keeps only the first and the last version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from ..batch.weight_versions import CHUNK_SEALS, CHUNKS, UNKNOWN, Chunk, hash_turn

Note = TypeVar("Note")


class RowNotes(WeakValueDictionary[str, Note], Generic[Note]):
    """Notes of rows, by request id; a note exists as long as the row's agent loop references the client's result.

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


class Attempt(NamedTuple):
    """One attempt of a request: the ids sent, the ids sampled, and the extra fields of the server's answer."""

    prompt: list[int]
    sampled: list[int]
    fields: dict[str, Any]


class Request(NamedTuple):
    """One request of a row, with all of its attempts; ``output`` is the result of verl's client."""

    request_id: str
    shares_ids: bool
    prompt: list[int]
    attempts: Sequence[Attempt]
    output: Any

    def find_note(self, rows: RowNotes[Note]) -> Note:
        """Find the note of this request's row."""
        return rows.find(self.request_id, shared=self.shares_ids)


Noter = Callable[[Request], None]
"""Adds a note to the extra fields of a request's output. A tool agent keeps the extra fields of its first turn, so a
noter updates the row's note in those fields. Clients are pickled, so a noter must be a module-level function, and notes
are kept in a global ``RowNotes``."""

_attempts: ContextVar[list[Attempt] | None] = ContextVar("offpolicy_attempts", default=None)
"""Attempts of the current request."""


class Attempts(LLMServerClient):
    """Client that records each attempt."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> Any:
        """Generate in the same way as verl's client."""
        output = await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)
        if (attempts := _attempts.get()) is not None:
            attempts.append(Attempt(list(prompt_ids), list(output.token_ids), dict(output.extra_fields)))
        return output


class Requests:
    """Mixin for a client whose attempts are recorded by ``Attempts``; calls the client's noters after each request."""

    noters: tuple[Noter, ...]
    shares_ids: bool
    """True if different rows can have the same request id."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> Any:
        """Generate in the same way as verl's client, and add the row's notes to the output."""
        attempts: list[Attempt] = []
        token = _attempts.set(attempts)
        try:
            output = await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)  # type: ignore[misc]
        finally:
            _attempts.reset(token)
        for noter in self.noters:
            noter(Request(request_id, self.shares_ids, prompt_ids, attempts, output))
        return output


class NotingClient(Requests, Attempts):
    """verl's client, with noters."""


class NotingResumingClient(Requests, FullyAsyncLLMServerClient, Attempts):
    """verl's client that resumes requests after a synchronisation has aborted them, with noters."""


_NOTING: dict[type, type[LLMServerClient]] = {
    LLMServerClient: NotingClient,
    FullyAsyncLLMServerClient: NotingResumingClient,
    NotingClient: NotingClient,
    NotingResumingClient: NotingResumingClient,
}


def note_rows(client: LLMServerClient, noter: Noter, what: str, off: str, error: type[Exception]) -> LLMServerClient:
    """Replace a client of verl with a client that has the same state and also calls ``noter``.

    Args:
        what: description of the recorded data, for errors.
        off: the override that makes the notes unnecessary.
        error: class of the error if the given client is not one of verl's.
    """
    if (kind := _NOTING.get(type(client))) is None:
        raise error(
            f"the client of the rollout servers is {type(client).__name__}, but {what} are recorded only for verl's "
            f"own clients. Fix: use verl's client, or set {off}."
        )
    made: Any = object.__new__(kind)
    # The key is read here, because the first access to a configuration in each agent loop's process would be slow.
    shares_ids = bool(getattr(client.config.actor_rollout_ref.rollout, "full_determinism", False))
    made.__dict__.update(vars(client), noters=(*getattr(client, "noters", ()), noter), shares_ids=shares_ids)
    return made


logger = logging.getLogger("verl.offpolicy")


class Turns(list[list[Chunk]]):
    """Chunks of each turn of one row; a subclass of list, because plain lists do not support weak references.

    Attributes:
        seals: the hash of each turn, see ``weight_versions.check_chunks``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seals: list[int] = []


_rows: RowNotes[Turns] = RowNotes(Turns)


def _add_versions(request: Request) -> None:
    """Add ``CHUNKS``, the (version, number of tokens) of each attempt that sampled a token, and ``CHUNK_SEALS``, which
    lets the trainer check the chunks."""
    sampled = [each for each in request.attempts if each.sampled]
    chunks: list[Any] = [(each.fields.get("global_steps"), len(each.sampled)) for each in sampled]
    if any(version is None for version, _ in chunks):
        return
    if (lost := len(request.output.token_ids) - sum(tokens for _, tokens in chunks)) > 0:
        # These tokens come from an attempt that bypassed Attempts; if a staleness limit is set, they stop the run.
        chunks.append((UNKNOWN, lost))
    turns = request.find_note(_rows)
    if chunks:
        turns.append(chunks)
        turns.seals.append(hash_turn(chunks))
    request.output.extra_fields |= {CHUNKS: turns, CHUNK_SEALS: turns.seals}


def note_versions(client: LLMServerClient) -> LLMServerClient:
    """Replace verl's client with a client that records versions; any other client is returned unchanged."""
    if type(client) is not FullyAsyncLLMServerClient:
        logger.warning(
            "the client of the rollout servers is %s, so versions of the weights are known only per sequence.",
            type(client).__name__,
        )
        return client
    return note_rows(client, _add_versions, "versions", "offpolicy.staleness.eta=null", TypeError)
