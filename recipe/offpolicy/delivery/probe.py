"""A fixed probe that rollout engines answer after each synchronisation, and the trainer before its next update.

Called function of vLLM's and SGLang's servers from verl 0.8.0 on: ``generate(prompt_ids, sampling_params,
request_id)``. Its answer has ``extra_fields["prompt_logprobs"]``, and from 0.9.1 on ``num_cached_tokens``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import ray

from ..proof.verify import LivenessError
from .probe_statistics import IN_A_ROW, ProbeTest

logger = logging.getLogger("verl.offpolicy")

Pair = tuple[list[int], list[int]]
SEQUENCES, BEFORE, TOKENS = 32, 8, 16
"""Number of sequences in the probe, prompt tokens at the start of each, and most tokens of each."""
CACHED = 600
"""Tokens of the request that must not be found in a prefix cache."""
PATIENCE = 60.0
"""Seconds to wait for missing answers when the trainer is about to update."""
KEPT_IN_A_ROW = 2
LOOSE = 0.5
"""Share of an update that survives the engine's rounding; below it, answers are not expected to change."""


def draw_probe(rows: Sequence[Pair], uids: list[str]) -> list[list[int]]:
    """Draw the probe's sequences from a batch: different prompts first, around the beginning of the response."""
    turns = [uids[:row].count(uid) for row, uid in enumerate(uids)]
    order = sorted(range(len(rows)), key=turns.__getitem__)
    drawn = []
    for prompt, response in (rows[row] for row in order):
        ids = (prompt[-BEFORE:] + response)[:TOKENS]
        if len(ids) > 2 and ids not in drawn:
            drawn.append(ids)
    return drawn[: min(SEQUENCES, len(rows))]


def join_responses(rows: Sequence[Pair], most: int) -> list[int]:
    """Join responses to a request of at most ``most`` tokens that starts like no rollout."""
    return [token for _, response in rows for token in response][: max(min(most, CACHED), 0)]


class Probe:
    """The probe of one run.

    Args:
        longest: most tokens that the engine accepts.
        advice: last sentence of errors: what to do.
    """

    def __init__(self, longest: int | None, advice: str) -> None:
        self._longest, self._advice = longest or CACHED, advice
        self._sequences: list[list[int]] = []
        self._uncached: list[int] = []
        self._pending: list[tuple[Any, Any, list[Any]]] = []
        self._tests: dict[int, ProbeTest] = {}
        self._kept: dict[int, int] = {}
        self._off = ""

    def ask(self, replicas: Sequence[Any]) -> None:
        """Ask each replica's server right after it got new weights, before any other request; does not wait."""
        self._pending = []
        if not self._sequences or self._off:
            return
        for replica in replicas:
            cached = _ask(replica.servers[0], self._uncached, {}) if self._uncached else None
            asked = [_ask(replica.servers[0], ids, {"prompt_logprobs": 0}) for ids in self._sequences]
            self._pending.append((replica, cached, asked))

    def hear(self, batch: Any, synchronisation: int, update_seen: float) -> dict[str, float]:
        """Compare the answers with the trainer's own log-probs; returns metrics.

        Args:
            batch: the next batch, before any update; its view computes log-probs.
            synchronisation: number of the synchronisation, counted from 1.
            update_seen: share of the last update that survives the engine's rounding; NaN if unknown.

        Raises:
            LivenessError: the engine's answers do not follow the trainer's weights, or come from a stale prefix cache.
        """
        if self._off:
            return {}
        if not self._sequences:
            rows = batch.token_ids
            self._sequences = draw_probe(rows, list(batch.uids))
            self._uncached = join_responses(rows, self._longest - 2)
            return {}
        pending, self._pending = self._pending, []
        metrics: dict[str, float] = {}
        heard = [
            (replica, answers)
            for replica, cached, asked in pending
            if (answers := self._collect(replica, cached, asked))
        ]
        if not heard or len(batch.uids) < len(self._sequences):
            return metrics
        own = self._compute_own(batch)
        for replica, answers in heard if own else ():
            metrics |= self._judge(replica, answers, own, synchronisation, update_seen)
        return metrics

    def _collect(self, replica: Any, cached: Any, asked: Sequence[Any]) -> list[list[float]] | None:
        everything = [*([] if cached is None else [cached]), *asked]
        _, late = ray.wait(everything, num_returns=len(everything), timeout=PATIENCE)
        if late:
            return None
        try:
            outputs = ray.get(everything)
        except Exception as error:  # a failing engine ends the run elsewhere, with its own message
            self._stop_asking(f"the rollout engine does not answer: {error}")
            return None
        if cached is not None:
            self._judge_cache(replica, outputs.pop(0).extra_fields.get("num_cached_tokens"))
        answers = [output.extra_fields.get("prompt_logprobs") for output in outputs]
        if any(not answer for answer in answers):
            if all(output.token_ids for output in outputs):  # none was aborted
                self._stop_asking("the rollout server returns no log-probs of prompts")
            return None
        return [[token[0] for token in answer[:-1]] for answer in answers]

    def _judge_cache(self, replica: Any, found: int | None) -> None:
        self._kept[id(replica)] = self._kept.get(id(replica), 0) + 1 if found else 0
        if self._kept[id(replica)] >= KEPT_IN_A_ROW:
            raise LivenessError(
                f"the rollout engine kept its prefix cache after new weights, at {KEPT_IN_A_ROW} probes in a row: "
                f"{found} of {len(self._uncached)} tokens of the first request were found in it. Responses are sampled "
                f"with keys and values of older weights. {self._advice}"
            )

    def _compute_own(self, batch: Any) -> list[list[float]]:
        pairs = [(ids[:1], ids[1:]) for ids in self._sequences]
        try:
            own: list[list[float]] = batch.compute_log_probs(pairs)
        except Exception as error:
            self._stop_asking(f"the trainer cannot score it: {error}")
            return []
        return own

    def _stop_asking(self, reason: str) -> None:
        self._off = reason
        logger.warning("the probe of delivered weights is off: %s.", reason)

    def _judge(
        self, replica: Any, answers: Sequence[Sequence[float]], own: Sequence[Sequence[float]], at: int, seen: float
    ) -> dict[str, float]:
        gaps = [
            abs(a - b) for theirs, ours in zip(answers, own, strict=True) for a, b in zip(theirs, ours, strict=True)
        ]
        metrics = {"probe_apart": sum(gaps) / len(gaps)}
        test = self._tests.setdefault(id(replica), ProbeTest())
        if seen < LOOSE:  # rounding alone, without a missing delivery, keeps the answers unchanged
            return metrics
        outcome = test.step(answers, own)
        if outcome == "first":
            return metrics
        change = test.change
        metrics |= {"probe_slope": change.slope, "probe_error": change.error, "probe_p": change.p}
        if outcome == "fails":
            raise LivenessError(
                f"synchronisation {at}: the rollout engine's answers to a probe of {len(own)} sequences do not follow "
                f"the trainer's weights: they change by {change.slope:.2g} +- {change.error:.2g} of the trainer's "
                f"change (1: the weights were delivered, 0: they were not; p = {change.p:.1g}), {IN_A_ROW} times in a "
                f"row. {self._advice}"
            )
        return metrics


def _ask(server: Any, ids: Sequence[int], params: Mapping[str, Any]) -> Any:
    generate: Callable[..., Any] = server.generate.remote
    sampling = {"max_tokens": 1, "temperature": 1.0, **params}
    return generate(prompt_ids=list(ids), sampling_params=sampling, request_id=f"delivery-{uuid4().hex}")
