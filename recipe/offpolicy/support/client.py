"""A client of verl's rollout servers that records the support that each token was sampled from."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from ..staleness.client import RowNotes, VersionedClient, convert
from .support_notes import NOTE, SupportNote
from .support_settings import SUPPORT
from .token_supports import SupportError, TokenSupports

ANSWER = "offpolicy_support_answer"
"""Key in a server's extra fields: ``TokenSupports`` of the tokens that it sampled."""
_rows: RowNotes[SupportNote] = RowNotes(SupportNote)
"""Global because the client is pickled."""


class SupportAttempts(LLMServerClient):
    """verl's client with ``NOTE`` in ``extra_fields``.

    A tool agent keeps the extra fields of its first turn, so this client updates the row's note in those fields. Tokens
    that the server returns without a support have no entry, and the worker then stops the run. An error raised here
    would not stop the run: verl would count the row as failed and continue.
    """

    shares_ids: bool
    """True if different rows can have the same request id."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> Any:
        """Generate like verl's client, with the row's note."""
        output = await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)
        supports = output.extra_fields.pop(ANSWER, None)
        note = _rows.find(request_id, shared=self.shares_ids)
        if isinstance(supports, TokenSupports) and len(supports.sizes) == len(output.token_ids):
            note.add(prompt_ids, output.token_ids, supports)
        output.extra_fields[NOTE] = note
        return output


class SupportResumingClient(FullyAsyncLLMServerClient, SupportAttempts):
    """``SupportAttempts`` for verl's client that resumes requests aborted by a synchronisation."""

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        """Generate like verl's client, and add the row's note, because that client drops its attempts' extra fields."""
        # This reference keeps the note alive over all attempts, because the table has only a weak one.
        note = _rows.find(request_id, shared=self.shares_ids)
        output = await super().generate(request_id, **kwargs)
        output.extra_fields[NOTE] = note
        return output


class SupportVersionedClient(SupportResumingClient, VersionedClient):
    """``SupportAttempts`` for the client that records versions per token."""


_NOTING: dict[type, type[SupportAttempts]] = {
    LLMServerClient: SupportAttempts,
    FullyAsyncLLMServerClient: SupportResumingClient,
    VersionedClient: SupportVersionedClient,
}


def note_supports(client: LLMServerClient, key: str = SUPPORT) -> LLMServerClient:
    """Replace a client by a client that records supports.

    Args:
        key: the key that needs supports, for errors.

    Raises:
        SupportError: the given client is not one of verl's.
    """
    if (kind := _NOTING.get(type(client))) is None:
        raise SupportError(
            f"the client of the rollout servers is {type(client).__name__}, but supports are recorded only for verl's "
            f"own clients. Fix: use verl's client, or set {key}=null."
        )
    return convert(client, kind)
