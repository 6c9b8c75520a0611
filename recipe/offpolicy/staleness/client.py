"""A client of verl's rollout servers that notes which version of the weights sampled how many tokens.

A synchronisation of the weights aborts every request; verl's client sends prompt and tokens so far again. Each attempt
is hence sampled by one version, as its server says with its tokens, of which verl's client hands on the first and the
last alone.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from ..batch.token_versions import CHUNKS, UNKNOWN, Chunk

logger = logging.getLogger("verl.offpolicy")


class Turns(list[list[Chunk]]):
    """Chunks of each turn of one row: a list that can be referred to weakly."""


_attempts: ContextVar[list[Chunk] | None] = ContextVar("offpolicy_attempts", default=None)
"""Chunks of the request that runs."""
_rows: WeakValueDictionary[str, Turns] = WeakValueDictionary()
"""Rows whose agent loop still holds what the client gave it, by request id; here, for the client itself is pickled."""


class Attempts(LLMServerClient):
    """Client that notes (version, tokens) of each attempt that sampled a token."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as verl's client does."""
        output = await super().generate(*args, **kwargs)
        chunks = _attempts.get()
        if chunks is not None and output.token_ids:
            chunks.append((output.extra_fields.get("global_steps"), len(output.token_ids)))
        return output


class VersionedClient(FullyAsyncLLMServerClient, Attempts):
    """verl's resuming client, whose every attempt goes through ``Attempts``; adds ``CHUNKS`` to ``extra_fields``.

    A tool agent keeps the extra fields of its first turn: later turns are added to the list that lies in those.
    """

    shares_ids: bool
    """True if rows have ids in common."""

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        """Generate as verl's client does, with the chunks of the row so far in the output."""
        chunks: list[Chunk] = []
        token = _attempts.set(chunks)
        try:
            output = await super().generate(request_id, **kwargs)
        finally:
            _attempts.reset(token)
        if any(version is None for version, _ in chunks):
            return output
        if (lost := len(output.token_ids) - sum(tokens for _, tokens in chunks)) > 0:
            # Of an attempt that went past Attempts: a run with a limit stops by it.
            chunks.append((UNKNOWN, lost))
        turns = self._find_row(request_id)
        if chunks:
            turns.append(chunks)
        output.extra_fields[CHUNKS] = turns
        return output

    def _find_row(self, request_id: str) -> Turns:
        return Turns() if self.shares_ids else _rows.setdefault(request_id, Turns())


def note_versions(client: LLMServerClient) -> LLMServerClient:
    """Build the client that notes versions in the place of verl's own; another one is returned as it is."""
    if type(client) is not FullyAsyncLLMServerClient:
        logger.warning(
            "the client of the rollout servers is %s: versions of the weights are known by row alone.",
            type(client).__name__,
        )
        return client
    versioned = VersionedClient.__new__(VersionedClient)
    versioned.__dict__.update(vars(client))
    # Read here and not in each agent loop's process, where the first look at a configuration is slow.
    versioned.shares_ids = bool(getattr(client.config.actor_rollout_ref.rollout, "full_determinism", False))
    return versioned
