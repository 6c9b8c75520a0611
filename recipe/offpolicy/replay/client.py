"""A client of verl's rollout servers that records the routes with which each row's tokens were sampled.

verl's tool agent uses the routes of its last turn for all tokens; this client keeps the routes of each turn.
"""

from __future__ import annotations

from typing import Any

import torch

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from ..staleness.client import RowNotes, VersionedClient, convert
from .batch_routes import NOTE, RouteNote
from .expert_choice import ReplayError

_rows: RowNotes[RouteNote] = RowNotes(RouteNote)
"""Global because the client is pickled."""


class RoutedClient(LLMServerClient):
    """verl's client with ``NOTE`` in ``extra_fields``.

    A tool agent keeps the extra fields of its first turn, so this client updates the row's note in those fields.
    """

    shares_ids: bool
    """True if different rows can have the same request id."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> Any:
        """Generate like verl's client, and add the row's note and the routes with which its tokens were sampled.

        Raises:
            ReplayError: the server returned no routes.
        """
        output = await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)
        if output.routed_experts is None:
            if not output.token_ids:
                return output
            raise ReplayError(
                "the rollout server returned tokens without their routes. Fix: use a mixture of experts with "
                "enable_return_routed_experts in the rollout server, or set router_replay.mode=disabled."
            )
        note = _rows.find(request_id, shared=self.shares_ids)
        routes = torch.as_tensor(output.routed_experts)
        output.routed_experts = note.keep_sampled([*prompt_ids, *output.token_ids], routes).numpy()
        output.extra_fields[NOTE] = note
        return output


class RoutedResumingClient(RoutedClient, FullyAsyncLLMServerClient):
    """``RoutedClient`` for verl's client that resumes requests aborted by a synchronisation."""


class RoutedVersionedClient(RoutedClient, VersionedClient):  # type: ignore[misc]
    """``RoutedClient`` for the client that records versions per token."""


_ROUTED: dict[type, type[RoutedClient]] = {
    LLMServerClient: RoutedClient,
    FullyAsyncLLMServerClient: RoutedResumingClient,
    VersionedClient: RoutedVersionedClient,
}


def note_routes(client: LLMServerClient) -> LLMServerClient:
    """Replace a client by a client that records routes.

    Raises:
        ReplayError: the given client is not one of verl's.
    """
    if (kind := _ROUTED.get(type(client))) is None:
        raise ReplayError(
            f"the client of the rollout servers is {type(client).__name__}, but routes are recorded only for verl's "
            f"own clients. Fix: use verl's client, or set router_replay.mode=disabled."
        )
    return convert(client, kind)
