"""A client of verl's rollout servers that notes the routes of each row and keeps those its tokens were sampled with.

verl's tool agent takes the routes of its last turn for all tokens; here each turn's tokens keep their own turn's.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from ..staleness.client import VersionedClient
from .expert_choice import ReplayError
from .route_notes import NOTE, RouteNote

_rows: WeakValueDictionary[str, RouteNote] = WeakValueDictionary()
"""Rows whose agent loop still holds what the client gave it, by request id; here, for the client itself is pickled."""


class RoutedClient(LLMServerClient):
    """verl's client with ``NOTE`` in ``extra_fields``.

    A tool agent keeps the extra fields of its first turn, in which the note of the row is brought up to date.
    """

    shares_ids: bool
    """True if rows have ids in common."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> Any:
        """Generate as verl's client does, with the row's note and the routes that its tokens were sampled with.

        Raises:
            ReplayError: the server returned no routes.
        """
        output = await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)
        if output.routed_experts is None:
            if not output.token_ids:
                return output
            raise ReplayError(
                "the rollout server returned tokens without the routes that they were sampled with. Fix: see that it "
                "runs a mixture of experts with enable_return_routed_experts, or set router_replay.mode=disabled."
            )
        note = RouteNote() if self.shares_ids else _rows.setdefault(request_id, RouteNote())
        routes = torch.as_tensor(output.routed_experts)
        output.routed_experts = note.keep_sampled([*prompt_ids, *output.token_ids], routes).numpy()
        output.extra_fields[NOTE] = note
        return output


class RoutedResumingClient(RoutedClient, FullyAsyncLLMServerClient):
    """The same of verl's client that resumes requests which a synchronisation has aborted."""


class RoutedVersionedClient(RoutedClient, VersionedClient):  # type: ignore[misc]
    """The same of the client that notes versions by token."""


_ROUTED: dict[type, type[RoutedClient]] = {
    LLMServerClient: RoutedClient,
    FullyAsyncLLMServerClient: RoutedResumingClient,
    VersionedClient: RoutedVersionedClient,
}


def note_routes(client: LLMServerClient) -> LLMServerClient:
    """Build the client that notes routes in the place of another.

    Raises:
        ReplayError: it is none of verl's.
    """
    if (kind := _ROUTED.get(type(client))) is None:
        raise ReplayError(
            f"the client of the rollout servers is {type(client).__name__}, and routes are noted by verl's own alone. "
            f"Fix: take verl's, or set router_replay.mode=disabled."
        )
    routed: Any = kind.__new__(kind)
    routed.__dict__.update(vars(client))
    routed.shares_ids = bool(getattr(client.config.actor_rollout_ref.rollout, "full_determinism", False))
    return routed
