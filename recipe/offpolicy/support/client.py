"""A client of verl's rollout servers that notes the supports that each row's tokens were sampled from."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from ..staleness.client import VersionedClient
from .support_notes import NOTE, SupportNote
from .token_supports import TokenSupports
from .truncated_softmax import SupportError

ANSWER = "offpolicy_support_answer"
"""Key of a server's answer among its extra fields: ``TokenSupports`` of the tokens that it sampled."""
_rows: WeakValueDictionary[str, SupportNote] = WeakValueDictionary()
"""Rows whose agent loop still holds what the client gave it, by request id; here, for the client itself is pickled."""


class SupportAttempts(LLMServerClient):
    """verl's client with ``NOTE`` in ``extra_fields``.

    A tool agent keeps the extra fields of its first turn, in which the note of the row is brought up to date. Tokens
    without an answer of the server's stay without an entry, by which the worker stops the run: raised here, verl would
    take it for a row that failed, and go on without it.
    """

    shares_ids: bool
    """True if rows have ids in common."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> Any:
        """Generate as verl's client does, with the row's note."""
        output = await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)
        supports = output.extra_fields.pop(ANSWER, None)
        note = SupportNote() if self.shares_ids else _rows.setdefault(request_id, SupportNote())
        if isinstance(supports, TokenSupports) and len(supports.sizes) == len(output.token_ids):
            note.add(prompt_ids, output.token_ids, supports)
        output.extra_fields[NOTE] = note
        return output


class SupportResumingClient(FullyAsyncLLMServerClient, SupportAttempts):
    """The same of verl's client that resumes requests which a synchronisation has aborted."""

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        """Generate as verl's client does; it hands on the extra fields of no attempt."""
        # The note has to outlive the attempts, which the row's table alone does not see to.
        note = _rows.setdefault(request_id, SupportNote())
        output = await super().generate(request_id, **kwargs)
        output.extra_fields[NOTE] = note
        return output


class SupportVersionedClient(VersionedClient, SupportAttempts):
    """The same of the client that notes versions by token."""

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        """Generate as the client does that notes versions."""
        note = _rows.setdefault(request_id, SupportNote())
        output = await super().generate(request_id, **kwargs)
        output.extra_fields[NOTE] = note
        return output


_NOTING: dict[type, type[SupportAttempts]] = {
    LLMServerClient: SupportAttempts,
    FullyAsyncLLMServerClient: SupportResumingClient,
    VersionedClient: SupportVersionedClient,
}


def note_supports(client: LLMServerClient) -> LLMServerClient:
    """Build the client that notes supports in the place of another.

    Raises:
        SupportError: it is none of verl's, or rows that are resumed have ids in common.
    """
    if (kind := _NOTING.get(type(client))) is None:
        raise SupportError(
            f"the client of the rollout servers is {type(client).__name__}, and supports are noted by verl's own "
            f"alone. Fix: take verl's, or set correction.support=null."
        )
    noting: Any = kind.__new__(kind)
    noting.__dict__.update(vars(client))
    noting.shares_ids = bool(getattr(client.config.actor_rollout_ref.rollout, "full_determinism", False))
    if noting.shares_ids and kind is not SupportAttempts:
        raise SupportError(
            "with full_determinism rows have ids in common, and a resumed request cannot be told from another row's. "
            "Fix: set actor_rollout_ref.rollout.full_determinism=false, or correction.support=null."
        )
    return noting
