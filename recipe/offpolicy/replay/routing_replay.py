"""Routing replay in a V1 run on FSDP: the workers that replay routes, the client that records routes, and the proof.

verl's tool agent uses the routes of its last turn for all tokens, whereas the client in this module keeps the routes of
each turn.

``verl_patches.worker_seams`` lists the patched functions of verl 0.9.1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.utils.padding import response_from_nested

from ..batch.padding import FORWARD, put_columns, read_columns
from ..batch.plan import take_reports
from ..extensions.add_on import AddOn
from ..proof.verify import LivenessError
from ..recording.schema import WITHOUT_REPLAY
from ..staleness.client import Request, RowNotes, note_rows
from .batch_routes import NOTE, REPLAY_STEP, Mode, ReplaySettings, RouteNote
from .expert_choice import ReplayError
from .fsdp_engine import AGES, REPORT, FirstLook, RoutingReport, install_in_worker

_rows: RowNotes[RouteNote] = RowNotes(RouteNote)


def _add_routes(request: Request) -> None:
    """Add ``NOTE``, and the routes with which the row's tokens were sampled.

    Raises:
        ReplayError: the server returned no routes.
    """
    output = request.output
    if output.routed_experts is None:
        if not output.token_ids:
            return
        raise ReplayError(
            "the rollout server returned tokens without their routes. Fix: set enable_return_routed_experts in the "
            "rollout server, or router_replay.mode=disabled."
        )
    note = request.find_note(_rows)
    routes = torch.as_tensor(output.routed_experts)
    output.routed_experts = note.keep_sampled([*request.prompt, *output.token_ids], routes).numpy()
    output.extra_fields[NOTE] = note


def note_routes(client: LLMServerClient) -> LLMServerClient:
    """Replace a client with a client that records routes."""
    return note_rows(client, _add_routes, "routes", "router_replay.mode=disabled", ReplayError)


WORSE = 1.1
"""Largest accepted ratio of k3 with the rollout engine's routes to k3 without these routes."""
_ROUNDING = 1e-6
"""k3 per token between two engines that differ only by rounding."""


def merge_reports(reports: Sequence[RoutingReport]) -> RoutingReport:
    """Sum the reports of one or several updates; ``reports`` must not be empty.

    Raises:
        LivenessError: ranks replay in different layers.
    """
    layers = reports[0].layers
    if any(report.layers != layers for report in reports):
        raise LivenessError(f"ranks replay routes in different layers: {sorted({each.layers for each in reports})}.")
    looks = [report.first for report in reports if report.first is not None]
    watched = [report.gradients for report in reports if report.gradients]
    sums: dict[str, Any] = {
        name: sum(getattr(each, name) for each in reports) for name in ("tokens", "withheld", "size")
    }
    for name in ("replayed", "entered", "equal", "ages"):
        by_place = np.array([getattr(each, name) for each in reports], dtype=np.int64).sum(0).tolist()
        sums[name] = tuple(tuple(each) if isinstance(each, list) else each for each in by_place)
    return replace(
        reports[0],
        **sums,
        gradients=tuple(math.fsum(each) for each in zip(*watched, strict=True)),
        first=FirstLook(
            *(sum(getattr(look, name) for look in looks) for name in ("checksums", "tokens")),
            *(math.fsum(getattr(look, name) for look in looks) for name in ("k3", "k3_without")),
        ),
    )


def judge(reports: Sequence[RoutingReport], mode: Mode, *, tokens: int) -> str:
    """Check the reports of one update, one per mini-batch and rank.

    Args:
        tokens: number of tokens of the update, without padding, over all ranks and epochs.

    Returns:
        A sentence for the log if the gates had a gradient; empty if gradients were not measured or there was no
        gradient.

    Raises:
        LivenessError: routes are missing, a gate has no gradient, or replay widens the mismatch.
    """
    if not reports:
        raise LivenessError(
            "routing replay: the update returned no report, so no route was replayed. The run uses a worker or "
            "engine that does not replay routes."
        )
    update = merge_reports(reports)
    look = update.first or FirstLook()
    if update.tokens != tokens:
        raise LivenessError(
            f"routing replay: {update.tokens} tokens were forwarded with routes, but the update has {tokens} tokens."
        )
    if len(set(update.replayed)) > 1 or not (update.replayed[0] or update.withheld):
        counts = dict(zip(update.layers, update.replayed, strict=True))
        raise LivenessError(f"routing replay: the layers replayed different numbers of tokens, {counts}.")
    metrics = measure_routes([update])
    seen = _judge_gradients(update)
    if mode == "R3" and look.tokens and look.k3 > WORSE * look.k3_without + _ROUNDING * look.tokens:
        raise LivenessError(
            f"routing replay: KL(mu, pi) by k3 is {metrics['kl_k3']:.2e} with the rollout engine's routes and "
            f"{metrics['kl_k3_without']:.2e} without them, so mu was not sampled with these routes. "
            f"Fix: run the same model in rollout and trainer, or set router_replay.mode=disabled."
        )
    return _describe(mode, update, metrics) if seen else ""


def measure_routes(reports: Sequence[RoutingReport]) -> dict[str, float]:
    """Compute the metrics under ``offpolicy/routing/`` from the reports of one or several updates."""
    update = merge_reports(reports)
    choices = sum(update.replayed)
    shares = [equal / count for equal, count in zip(update.equal, update.replayed, strict=True) if count]
    metrics = {
        "replayed_token_share": update.replayed[0] / update.tokens,
        "withheld_token_share": update.withheld / update.tokens,
        "equal_share": sum(update.equal) / choices if choices else math.nan,
        "equal_share_worst_layer": min(shares, default=math.nan),
        "bytes": float(update.size),
    }
    for age, (count, equal) in zip(AGES, update.ages, strict=True):
        metrics[f"{age}/equal_share"] = equal / count if count else math.nan
    if update.gradients:
        metrics["gate_gradient"] = sum(value > 0 for value in update.gradients) / len(update.gradients)
    if (look := update.first) and look.tokens:
        metrics |= {"kl_k3": look.k3 / look.tokens, "kl_k3_without": look.k3_without / look.tokens}
    return metrics


def _judge_gradients(update: RoutingReport) -> bool:
    if not update.gradients:
        return False
    named = dict(zip(update.layers, update.gradients, strict=True))
    if broken := [layer for layer, value in named.items() if not math.isfinite(value)]:
        raise LivenessError(f"routing replay: the gates of layer(s) {broken} have gradients that are not finite.")
    silent = [layer for layer, value in named.items() if value == 0]
    # With one expert per token, the expert's weight may be 1 for any score.
    if silent and len(silent) < len(named) and update.top_k > 1:
        raise LivenessError(
            f"routing replay: the gates of layer(s) {silent} have no gradient, although the gates of other layers have "
            f"one, so the scores of layer(s) {silent} do not reach the loss."
        )
    return len(silent) < len(named)


def _describe(mode: Mode, update: RoutingReport, metrics: dict[str, float]) -> str:
    parts = [
        f"routing replay {mode} LIVE in {len(update.layers)} layers: {metrics['replayed_token_share']:.1%} of tokens "
        "replayed with the recorded ids",
        f"{metrics['equal_share']:.1%} of choices are the trainer's own",
    ]
    if update.first and update.first.checksums:
        parts.append(f"routes of {update.first.checksums} rows as sampled")
    if "kl_k3" in metrics:
        parts.append(f"KL(mu, pi) by k3 {metrics['kl_k3']:.1e} with them and {metrics['kl_k3_without']:.1e} without")
    return ", ".join(parts) + "."


logger = logging.getLogger("verl.offpolicy")


class RoutingReplay(AddOn):
    """Feature that makes the actor's engine replay routes.

    Args:
        run: a run of a V1 trainer.
        settings: settings of the replay.
    """

    def __init__(self, run: Any, settings: ReplaySettings) -> None:
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
        settings, step = self._run.recording.settings, self._run.global_steps
        native = settings is not None and settings.without_replay and settings.records(step)
        return compute(self._put_native(batch) if native else batch)

    def _put_native(self, batch: Any) -> Any:
        """Compute log pi_old with the trainer's own routes, without replay, and store it together with the batch."""
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
