"""A fixed set of sequences that rollout engines score after each synchronisation, and the trainer before it updates.

g and e are the log-probs of the probe's tokens at one synchronisation: g from the engine, and e from the trainer's own
forward pass. dg and de are the changes in g and e since an earlier synchronisation. If the weights were delivered, dg =
de + noise; if not, dg is noise. The noise of 16-bit engines is correlated within a sequence, so sequences are the
independent samples. For each sequence, u = <dg - de, de> is symmetric around 0 if the weights were delivered;
otherwise, its mean is -|de|^2.

The probe calls ``generate(prompt_ids, sampling_params, request_id)`` of vLLM's and SGLang's servers, in verl 0.8.0 and
later. The answer contains ``extra_fields["prompt_logprobs"]`` and, in 0.9.1 and later, ``num_cached_tokens``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import ray
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..proof.verify import LivenessError

Answers = Sequence[Sequence[float]]
"""For each sequence, the log-probs of all its tokens except the first, in nats."""

FLIPS = 4095
"""Number of random sign vectors for the p-value; with the observed vector, there are 4096 in total."""
LEVEL = 1e-3
LEAST_SLOPE = 0.5
RESOLVED = 0.2
"""Largest standard error of the slope with which a synchronisation is judged; otherwise, changes accumulate first."""
IN_A_ROW = 3
"""Number of consecutive failures that stop a run. If the weights are delivered, each check fails with a probability of
at most ``LEVEL``, so the probability of a false alarm in 1 000 synchronisations is at most 1 000 * 1e-9 = 1e-6."""


@dataclass(frozen=True)
class Change:
    """Changes in a probe's log-probs between two synchronisations.

    Attributes:
        slope: slope of the regression of dg on de: 1 if the engine follows, 0 if it does not; NaN if de is 0.
        error: standard error of the slope over sequences; infinite if de is 0.
        p: probability, over random signs of the sequences, that the sum of u is at most the observed sum.
    """

    slope: float
    error: float
    p: float


def compare_changes(engine: Tensor, expected: Tensor, *, seed: int = 0) -> Change:
    """Compare the changes in the engine's log-probs with the expected changes.

    Args:
        engine: (S, T) float64, dg; 0 after a sequence's end.
        expected: (S, T) float64, de; 0 after a sequence's end.
        seed: seed of the random signs.
    """
    square, along = (expected * expected).sum(-1), (engine * expected).sum(-1)
    whole, count = float(square.sum()), len(square)
    if not whole > 0:
        return Change(math.nan, math.inf, 1.0)
    slope = float(along.sum()) / whole
    spread = float((along - slope * square).square().sum())
    error = math.sqrt(spread * count / max(count - 1, 1)) / whole
    residual = along - square
    signs = torch.randint(0, 2, (FLIPS, count), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
    sums = signs @ residual
    p = (1 + int((sums <= residual.sum()).sum())) / (FLIPS + 1)
    return Change(slope, error, p)


Outcome = Literal["first", "unresolved", "follows", "differs", "fails"]


class ProbeTest:
    """Tests one engine over all synchronisations of a run.

    Attributes:
        change: change from the reference to the latest synchronisation.
        failures: current number of consecutive failures.
    """

    def __init__(self) -> None:
        self._reference: tuple[Tensor, Tensor] | None = None
        self.change = Change(math.nan, math.inf, 1.0)
        self.failures = 0
        self._judged = 0

    def step(self, engine: Answers, expected: Answers) -> Outcome:
        """Process the answers of one synchronisation.

        Returns:
            ``first``: there is no earlier synchronisation to compare with; ``unresolved``: the expected change is too
            small to judge, and is added to the next one; ``follows``: the engine follows the trainer; ``differs``: the
            engine does not follow, but noise may be the reason; ``fails``: the engine has not followed ``IN_A_ROW``
            times in a row.
        """
        now = _stack(engine), _stack(expected)
        if self._reference is None:
            self._reference = now
            return "first"
        self.change = compare_changes(now[0] - self._reference[0], now[1] - self._reference[1], seed=self._judged)
        if not self.change.error <= RESOLVED:
            return "unresolved"
        self._reference = now
        self._judged += 1
        if self.change.p > LEVEL or self.change.slope >= LEAST_SLOPE:
            self.failures = 0
            return "follows"
        self.failures += 1
        return "fails" if self.failures >= IN_A_ROW else "differs"


def _stack(answers: Answers) -> Tensor:
    return pad_sequence([torch.tensor(each, dtype=torch.float64) for each in answers], batch_first=True)


logger = logging.getLogger("verl.offpolicy")

Pair = tuple[list[int], list[int]]
SEQUENCES, BEFORE, TOKENS = 32, 8, 16
"""Number of sequences in the probe, number of prompt tokens in each sequence, and maximum length of a sequence."""
CACHED = 600
"""Maximum number of tokens in the request that shows whether the prefix cache was cleared. If any of these tokens is in
the cache, the cache was not cleared."""
PATIENCE = 60.0
"""Seconds to wait for missing answers once the trainer is about to update."""
KEPT_IN_A_ROW = 2
LOOSE = 0.5
"""If less than this share of an update survives the engine's rounding, the probe expects no change and is not
judged."""


def draw_probe(rows: Sequence[Pair], uids: list[str]) -> list[list[int]]:
    """Draw the probe's sequences from a batch, preferring different prompts; each contains the start of a response."""
    turns = [uids[:row].count(uid) for row, uid in enumerate(uids)]
    order = sorted(range(len(rows)), key=turns.__getitem__)
    drawn = []
    for prompt, response in (rows[row] for row in order):
        ids = (prompt[-BEFORE:] + response)[:TOKENS]
        if len(ids) > 2 and ids not in drawn:
            drawn.append(ids)
    return drawn[: min(SEQUENCES, len(rows))]


def join_responses(rows: Sequence[Pair], most: int) -> list[int]:
    """Join responses into a request of at most ``most`` tokens that starts like no rollout's prompt."""
    return [token for _, response in rows for token in response][: max(min(most, CACHED), 0)]


class Probe:
    """The probe of a run.

    Args:
        longest: maximum number of tokens that the engine accepts.
        advice: last sentence of error messages, which says what to do.
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
        """Send the probe to each replica's server after it has received new weights; do not wait for the answers."""
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
            batch: the next batch, before any update; its view is used to compute log-probs.
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
        heard = [(replica, self._collect(replica, cached, asked)) for replica, cached, asked in pending]
        heard = [(replica, answers) for replica, answers in heard if answers]
        metrics: dict[str, float] = {}
        if heard and len(batch.uids) >= len(self._sequences):
            try:
                own = batch.compute_log_probs([(ids[:1], ids[1:]) for ids in self._sequences])
            except Exception as error:
                self._stop_asking(f"the trainer cannot score the probe: {error}")
                return metrics
            for replica, answers in heard:
                metrics |= self._judge(replica, answers, own, synchronisation, update_seen)
        return metrics

    def _collect(self, replica: Any, cached: Any, asked: Sequence[Any]) -> list[list[float]]:
        """Wait for the answers of a replica; return an empty list if they are late or incomplete."""
        everything = [*asked] if cached is None else [cached, *asked]
        _, late = ray.wait(everything, num_returns=len(everything), timeout=PATIENCE)
        if late:
            return []
        try:
            outputs = ray.get(everything)
        except Exception as error:  # other code ends the run if an engine fails
            self._stop_asking(f"the rollout engine does not answer: {error}")
            return []
        if cached is not None:
            self._judge_cache(replica, outputs.pop(0).extra_fields.get("num_cached_tokens"))
        answers = [output.extra_fields.get("prompt_logprobs") for output in outputs]
        if any(not answer for answer in answers):
            if all(output.token_ids for output in outputs):  # none was aborted
                self._stop_asking("the rollout server returns no log-probs of prompts")
            return []
        return [[token[0] for token in answer[:-1]] for answer in answers]

    def _judge_cache(self, replica: Any, found: int | None) -> None:
        self._kept[id(replica)] = self._kept.get(id(replica), 0) + 1 if found else 0
        if self._kept[id(replica)] >= KEPT_IN_A_ROW:
            raise LivenessError(
                f"the rollout engine kept its prefix cache after receiving new weights, in {KEPT_IN_A_ROW} probes in "
                f"a row: {found} of {len(self._uncached)} tokens of the first request were found in the cache. "
                f"Responses are sampled with keys and values of older weights. {self._advice}"
            )

    def _stop_asking(self, reason: str) -> None:
        self._off = reason
        logger.warning("the probe of delivered weights is disabled: %s.", reason)

    def _judge(
        self, replica: Any, answers: Sequence[Sequence[float]], own: Sequence[Sequence[float]], at: int, seen: float
    ) -> dict[str, float]:
        gaps = [
            abs(a - b) for theirs, ours in zip(answers, own, strict=True) for a, b in zip(theirs, ours, strict=True)
        ]
        metrics = {"probe_apart": sum(gaps) / len(gaps)}
        test = self._tests.setdefault(id(replica), ProbeTest())
        # If seen is small, rounding can leave the answers unchanged even if the weights were delivered.
        if seen < LOOSE or (outcome := test.step(answers, own)) == "first":
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
    sampling = {"max_tokens": 1, "temperature": 1.0, **params}
    request_id = f"delivery-{uuid4().hex}"
    return server.generate.remote(prompt_ids=list(ids), sampling_params=sampling, request_id=request_id)
