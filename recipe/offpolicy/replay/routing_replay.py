"""Routing replay in a V1 run on FSDP: workers that replay routes, a client that records routes, and the proof.

verl's tool agent uses the routes of its last turn for all tokens; this client keeps the routes of each turn.

``verl_patches.router_replay`` lists the patched functions of verl 0.9.1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.utils.padding import response_from_nested

from ..batch.queue_columns import FORWARD, put_columns, read_columns
from ..batch.reports import take_reports
from ..extensions.add_on import AddOn
from ..extensions.v1_run import V1Run
from ..recording.schema import WITHOUT_REPLAY
from ..staleness.client import RowNotes, VersionedClient, convert
from .batch_routes import NOTE, REPLAY_STEP, RouteNote
from .expert_choice import ReplayError
from .fsdp_engine import REPORT, install_in_worker
from .replay_settings import ReplaySettings
from .tally import RoutingReport, judge, measure_routes

_rows: RowNotes[RouteNote] = RowNotes(RouteNote)
"""Global because the client is pickled."""


class RoutedClient(LLMServerClient):
    """A version of verl's client that also adds ``NOTE`` to ``extra_fields``.

    A tool agent keeps the extra fields of its first turn, so this client updates the row's note in those fields.
    """

    shares_ids: bool
    """True if different rows can have the same request id."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> Any:
        """Generate as verl's client does, and add the row's note and the routes with which its tokens were sampled.

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
    """Replace a client with a client that records routes.

    Raises:
        ReplayError: the given client is not one of verl's.
    """
    if (kind := _ROUTED.get(type(client))) is None:
        raise ReplayError(
            f"the client of the rollout servers is {type(client).__name__}, but routes are recorded only for verl's "
            f"own clients. Fix: use verl's client, or set router_replay.mode=disabled."
        )
    return convert(client, kind)


logger = logging.getLogger("verl.offpolicy")


class RoutingReplay(AddOn):
    """Replay of routes by the actor's engine.

    Args:
        run: a run of a V1 trainer.
        settings: settings of the replay.
    """

    def __init__(self, run: V1Run, settings: ReplaySettings) -> None:
        self._run, self._settings = run, settings
        self._reports: Sequence[RoutingReport] = ()  # of the updates of the current step

    def run_step(self, run: Callable[[], Any], metrics: dict[str, Any]) -> Any:
        self._reports = ()
        batch = run()
        # The counts are summed over all updates of the step, because verl would average shares even if some updates
        # have none.
        routing: dict[str, float] = measure_routes(self._reports) if self._reports else {}
        metrics.update({f"offpolicy/routing/{name}": value for name, value in routing.items()})
        return batch

    def engine_part(self) -> Callable[[Any], object]:
        return partial(install_in_worker, settings=self._settings)

    def rollout_client(self, client: Any) -> Any:
        return note_routes(client) if self._settings.mode == "R3" else client

    def batch_flags(self) -> dict[str, Any]:
        # Rows from an extension were not sampled, so they have no routes.
        return {REPLAY_STEP: self._run.global_steps}

    def old_log_prob(self, compute: Callable[[Any], Any], batch: Any, metrics: dict[str, Any]) -> Any:
        return compute(self._put_native(batch) if self._records_without_replay else batch)

    @property
    def _records_without_replay(self) -> bool:
        settings = self._run.recording.settings
        return settings is not None and settings.without_replay and settings.records(self._run.global_steps)

    def _put_native(self, batch: Any) -> Any:
        """Compute log pi_old under the trainer's own routes, without replay, and store it next to the batch."""
        temperature = self._run.config.actor_rollout_ref.rollout.temperature
        step = batch.extra_info.pop(REPLAY_STEP)
        batch.extra_info.update(FORWARD | {"temperature": temperature})
        self._run.workers.compute_log_prob(batch)
        batch.extra_info[REPLAY_STEP] = step
        found = read_columns(batch, "log_probs", "response_mask")
        native = response_from_nested(found["log_probs"], found["response_mask"])
        columns = {WITHOUT_REPLAY: native.float()}
        self._run.cost.add_columns(columns)
        return put_columns(batch, **columns)

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        tokens = sum(tag["prompt_len"] + tag["response_len"] for tag in batch.tags)
        tokens *= self._run.config.actor_rollout_ref.actor.ppo_epochs
        reports = take_reports(metrics, REPORT)
        if proof := judge(reports, self._settings.mode, tokens=tokens):
            logger.info(proof)
        self._reports = (*self._reports, *reports)
