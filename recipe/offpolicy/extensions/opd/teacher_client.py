"""A client of the teacher: any server of vLLM's OpenAI-compatible interface, asked over HTTP by threads of its own.

``POST /v1/completions`` with token ids, ``max_tokens=1`` and ``prompt_logprobs=0`` returns, for each position of the
prompt but the first, the log-prob of the token that stands there; vLLM computes these at temperature 1, before any
processor of the sampling.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from threading import Lock
from typing import Any

import requests

from .settings import TeacherSettings

ROWS = 16
"""Most rows of one request: one with 64 rows takes a third of the time of 64 with one, and blocks no other for long."""
CONNECT = 5.0
"""Seconds for a connection."""
PAUSE = 0.5
"""Seconds before a request is sent again; doubled each time."""
EXCLUDED = -9999.0
"""Stands for -inf, which JSON does not have, in what vLLM sends."""


class TeacherError(RuntimeError):
    """The teacher did not answer as it has to; the run stops rather than train without it."""


@dataclass(frozen=True)
class Row:
    """Token ids of one rollout: the prompt, and as much of the response as takes part.

    Attributes:
        number: its place in the batch, for messages.
    """

    number: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]


@dataclass
class Scoring:
    """Log-probs of one batch that are being computed.

    Attributes:
        rows: as they were sent.
        started: seconds of ``time.monotonic``.
        ended: the same, of the last answer; of the start as long as there is none.
        retried: requests that were sent again.
    """

    rows: list[Row]
    started: float
    ended: float
    deadline: float
    answers: list[Future[list[list[float]]]]
    retried: int = 0

    @property
    def seconds(self) -> float:
        """Seconds that the teacher took for all rows."""
        return self.ended - self.started


class TeacherClient:
    """Requests to the teacher, sent as soon as a batch is sampled and awaited where its advantages are computed.

    Args:
        settings: addresses and limits.
        model: served name.
    """

    def __init__(self, settings: TeacherSettings, model: str) -> None:
        self._settings = settings
        self._model = model
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="teacher")
        self._session = requests.Session()
        self._session.trust_env = (
            False  # A proxy of the environment is for the world outside, not for a cluster's hosts.
        )
        self._turn = itertools.count()
        self._lock = Lock()

    def start(self, rows: Sequence[Row]) -> Scoring:
        """Send the rows, ``ROWS`` a request, and return at once."""
        now = time.monotonic()
        scoring = Scoring(list(rows), now, now, now + self._settings.timeout, [])
        for first in range(0, len(rows), ROWS):
            scoring.answers.append(self._threads.submit(self._ask, rows[first : first + ROWS], scoring))
        return scoring

    def wait(self, scoring: Scoring) -> list[list[float]]:
        """Wait for the log-probs of each row's response; -inf where the teacher excludes a token.

        Raises:
            TeacherError: an answer is missing, late or malformed.
        """
        found: list[list[float]] = []
        for answer in scoring.answers:
            try:
                found += answer.result(max(scoring.deadline - time.monotonic(), 0.0))
            except FutureTimeout:
                raise TeacherError(self._late(scoring)) from None
        return found

    def close(self) -> None:
        """Give up what is under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._session.close()

    def _late(self, scoring: Scoring) -> str:
        seconds = self._settings.timeout
        missing = sum(not answer.done() for answer in scoring.answers)
        return (
            f"the teacher at {', '.join(self._settings.urls)} has not scored {len(scoring.rows)} rows within "
            f"{seconds:g} s; {missing} of {len(scoring.answers)} requests are open. Fix: more replicas in "
            f"opd.teacher.url, or a larger opd.teacher.timeout."
        )

    def _ask(self, rows: Sequence[Row], scoring: Scoring) -> list[list[float]]:
        body = {
            "model": self._model,
            "prompt": [[*row.prompt, *row.response] for row in rows],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        choices = self._post(body, len(rows), scoring)
        found = [read_log_probs(choice.get("prompt_logprobs"), row) for choice, row in zip(choices, rows, strict=True)]
        with self._lock:
            scoring.ended = max(scoring.ended, time.monotonic())
        return found

    def _post(self, body: dict[str, Any], rows: int, scoring: Scoring) -> list[dict[str, Any]]:
        """Post until there is an answer of as many choices, to one address after the other.

        Raises:
            TeacherError: every attempt failed, or one was refused for what it asks.
        """
        failure = ""
        for attempt in range(self._settings.retries + 1):
            if attempt:
                with self._lock:
                    scoring.retried += 1
                time.sleep(max(min(PAUSE * 2 ** (attempt - 1), scoring.deadline - time.monotonic()), 0.0))
            url = self._settings.urls[next(self._turn) % len(self._settings.urls)]
            left = scoring.deadline - time.monotonic()
            if left <= 0:
                raise TeacherError(self._late(scoring))
            try:
                answer = self._session.post(f"{url}/v1/completions", json=body, timeout=(min(CONNECT, left), left))
            except requests.RequestException as error:
                failure = f"{url}: {type(error).__name__}"
                continue
            if answer.status_code >= 500:
                failure = f"{url}: HTTP {answer.status_code}"
                continue
            if answer.status_code != 200:
                raise TeacherError(
                    f"the teacher at {url} refused {rows} rows: HTTP {answer.status_code}: {_shorten(answer.text)} "
                    f"Fix: serve the model {body['model']} with a max_model_len that holds prompt and response."
                )
            return _list_choices(answer, url, rows)
        raise TeacherError(
            f"the teacher did not answer in {self._settings.retries + 1} attempts for {rows} rows ({failure}). "
            f"Fix: see whether it still serves, and resume the run from its checkpoint."
        )


def _list_choices(answer: requests.Response, url: str, rows: int) -> list[dict[str, Any]]:
    try:
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    except (ValueError, KeyError, TypeError):
        raise TeacherError(f"the teacher at {url} sent no completion: {_shorten(answer.text)}") from None
    if len(choices) != rows:
        raise TeacherError(f"the teacher at {url} answered {len(choices)} of {rows} rows.")
    return choices


def read_log_probs(entries: Sequence[dict[str, Any] | None] | None, row: Row) -> list[float]:
    """Read the log-probs of a row's response from vLLM's ``prompt_logprobs``, each by the id that was sent.

    Raises:
        TeacherError: a position is missing, of another token, or not a number; names the row and the position.
    """
    ids = (*row.prompt, *row.response)
    if entries is None or len(entries) != len(ids):
        given = "no" if entries is None else len(entries)
        raise TeacherError(f"row {row.number}: the teacher scored {given} positions of {len(ids)}.")
    if entries[0] is not None:
        raise TeacherError(f"row {row.number}, position 0: the teacher scored a token that nothing stands before.")
    found: list[float] = []
    for place, (entry, token) in enumerate(zip(entries, ids, strict=True)):
        if place == 0:
            continue
        if entry is None or str(token) not in entry:
            other = "nothing" if not entry else f"the token {', '.join(entry)}"
            raise TeacherError(
                f"row {row.number}, position {place}: sent the token {token}, the teacher scored {other}."
            )
        value = float(entry[str(token)]["logprob"])
        if math.isnan(value) or value > 1e-3:
            raise TeacherError(f"row {row.number}, position {place}: a log-prob of {value}.")
        found.append(-math.inf if value <= EXCLUDED else value)
    return found[len(row.prompt) - 1 :]


def _shorten(text: str) -> str:
    return " ".join(text.split())[:300]
