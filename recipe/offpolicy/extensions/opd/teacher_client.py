"""A client for teachers: servers with vLLM's OpenAI-compatible interface, called over HTTP in separate threads.

``POST /v1/completions`` with token ids, ``max_tokens=1`` and ``prompt_logprobs=0`` returns the log-prob of the token at
each position of the prompt except the first. vLLM computes these log-probs at temperature 1, before any logits
processor.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

import requests
from urllib3 import Retry
from urllib3.exceptions import InvalidHeader

from ...fault_tolerance.redaction import hide, redact_text, show_variable
from .settings import TeacherSettings

ROWS = 16
"""Largest number of rows per request. One request with 64 rows takes a third of the time of 64 requests with one row
each; smaller requests block other requests for a shorter time."""
CONNECT = 5.0
"""Seconds within which a connection must be established."""
PAUSE = 0.5
"""Seconds before a request is sent again; the pause doubles each time."""
EXCLUDED = -9999.0
"""vLLM's replacement for -inf, which JSON cannot represent."""

BUSY = (408, 425, 429)
"""HTTP statuses below 500 after which a request may succeed if it is repeated."""
REFUSED = (401, 403)
"""HTTP statuses with which a server rejects a key."""


class TeacherError(RuntimeError):
    """The teacher returned no valid answer; the run stops instead of training without the teacher.

    Attributes:
        reason, fix: what is wrong and what to do; ``fix`` is empty if ``reason`` contains it or if no fix is known.
    """

    def __init__(self, reason: str, fix: str = "") -> None:
        self.reason, self.fix = redact_text(reason), redact_text(fix)
        super().__init__(f"{self.reason} Fix: {self.fix}" if fix else self.reason)


@dataclass(frozen=True)
class Row:
    """Token ids of one rollout: the prompt, and the scored part of the response.

    Attributes:
        number: the rollout's position in the batch, for messages.
    """

    number: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]


@dataclass
class Scoring:
    """Pending log-probs of one batch.

    Attributes:
        rows: the rows that were sent.
        started: start time in seconds of ``time.monotonic``.
        ended: time of the last answer; before the first answer, the start time.
        retried: number of requests that were sent again.
    """

    rows: list[Row]
    started: float
    ended: float
    deadline: float
    answers: list[Future[list[list[float]]]]
    retried: int = 0

    @property
    def seconds(self) -> float:
        """Seconds that the teacher needed for all rows."""
        return self.ended - self.started


class Server:
    """A completion server with one or several addresses that all serve the same model.

    Args:
        settings: addresses and limits.
    """

    def __init__(self, settings: TeacherSettings) -> None:
        self.settings = settings
        self._session = open_session(settings)
        self._turn = itertools.count()

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def post(
        self, body: dict[str, Any], deadline: float, what: str, note_retry: Callable[[], None] = lambda: None
    ) -> tuple[str, bytes]:
        """Post a request for completions, trying one address after another until one answers.

        Args:
            deadline: in seconds of ``time.monotonic``.
            what: description of the request's content, for errors.
            note_retry: called before the request is sent again.

        Returns:
            The address and the answer.

        Raises:
            TeacherError: every attempt failed, or the request was rejected.
            requests.Timeout: the deadline passed before the next attempt.
        """
        settings, failure, pause = self.settings, "", PAUSE
        for attempt in range(settings.retries + 1):
            if attempt:
                note_retry()
                time.sleep(max(min(pause, deadline - time.monotonic()), 0.0))
            url = settings.urls[next(self._turn) % len(settings.urls)]
            if time.monotonic() >= deadline:
                raise requests.Timeout(f"{url} did not answer within {settings.timeout:g} s.")
            pause = PAUSE * 2**attempt
            try:
                answer = request(self._session, f"{url}/v1/completions", body, deadline)
            except requests.RequestException as error:
                failure = f"{url}: {type(error).__name__}"
                continue
            status = answer.status_code
            if status == 200:
                return url, answer.content
            if status < 500 and status not in BUSY:
                fix = f"serve the model {body['model']} with a max_model_len large enough for prompt and response."
                raise TeacherError(
                    f"the server at {url} rejected {what}: HTTP {status}: {shorten(answer.content)}",
                    explain_key(settings) if status in REFUSED else fix,
                )
            failure, pause = f"{url}: HTTP {status}", _read_pause(answer, pause)
        raise TeacherError(
            f"the server did not answer in {settings.retries + 1} attempts for {what} ({failure}).",
            "check whether the server still runs; a restarted run resumes from its last checkpoint.",
        )


class TeacherClient:
    """Client that sends a batch's requests after sampling, and awaits the teacher's answers when advantages are due.

    Args:
        settings: addresses and limits.
        model: served name.
        names: other names for the same weights, which answers may contain.
    """

    def __init__(self, settings: TeacherSettings, model: str, names: Collection[str] = ()) -> None:
        self._settings, self._server = settings, Server(settings)
        self._model, self._names = model, {model, *names}
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="teacher")
        self._lock = Lock()

    def start(self, rows: Sequence[Row]) -> Scoring:
        """Send the rows, ``ROWS`` per request, and return at once."""
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
            except (FutureTimeout, requests.Timeout):
                missing = sum(not each.done() or each.exception() is not None for each in scoring.answers)
                raise TeacherError(
                    f"the teacher at {', '.join(self._settings.shown)} has not scored {len(scoring.rows)} sequences "
                    f"within {self._settings.timeout:g} s; {missing} of {len(scoring.answers)} requests are "
                    "unanswered.",
                    "add replicas to opd.teacher.url, or set a larger opd.teacher.timeout.",
                ) from None
        return found

    def close(self) -> None:
        """Cancel pending requests."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._server.close()

    def _ask(self, rows: Sequence[Row], scoring: Scoring) -> list[list[float]]:
        def note_retry() -> None:
            with self._lock:
                scoring.retried += 1

        prompts = [[*row.prompt, *row.response] for row in rows]
        how = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        body = {"model": self._model, "prompt": prompts, **how}
        url, answer = self._server.post(body, scoring.deadline, _name(rows), note_retry)
        found = [
            read_log_probs(choice.get("prompt_logprobs"), row, url)
            for choice, row in zip(self._list_choices(answer, url, rows), rows, strict=True)
        ]
        with self._lock:
            scoring.ended = max(scoring.ended, time.monotonic())
        return found

    def _list_choices(self, text: bytes, url: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
        where = f"the teacher at {url}, {_name(rows)}"
        answer = parse_object(text, where)
        choices, model = answer.get("choices"), answer.get("model", self._model)
        if model not in self._names:
            raise TeacherError(
                f"{where}: the answer comes from the model {shorten(repr(model))}, but {self._model} was requested.",
                "set opd.teacher.model to the intended model, and opd.teacher.url to its server.",
            )
        if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
            raise TeacherError(f"{where} sent no completion: {shorten(text)}")
        by_index = {each.get("index"): each for each in choices}
        if len(choices) != len(rows) or by_index.keys() != set(range(len(rows))):
            shown = f"{len(choices)} answers with the indices {shorten(repr(list(by_index)))}"
            raise TeacherError(f"{where} sent {shown} instead of one answer per sequence.")
        return [by_index[number] for number in range(len(rows))]


def open_session(settings: TeacherSettings) -> requests.Session:
    """Open a session with the headers of the settings.

    From then on, this process hides the headers' values in everything that it prints.

    Raises:
        TeacherError: an environment variable that must contain a value is not set, or its value cannot be sent.
    """
    session = requests.Session()
    # Proxies in the environment are meant for external addresses, not for a cluster's hosts.
    session.trust_env = False
    session.headers["Accept-Encoding"] = "identity"
    named = {"Authorization": settings.api_key} if settings.api_key is not None else {}
    for name, variable in (named | dict(settings.headers)).items():
        key = f"opd.teacher.{'headers' if name in settings.headers else 'api_key'}"
        value = os.environ.get(variable, "").strip()
        if not value:
            fix = "export it where the trainer runs, on a cluster before `ray start`."
            raise TeacherError(f"the environment variable {show_variable(variable)} of {key} is not set.", fix)
        hide(value)
        if not (value.isascii() and value.isprintable()):
            wrong = "contains characters that are not allowed in a header"
            raise TeacherError(f"the environment variable {variable} of {key} {wrong}.")
        session.headers[name] = value if name in settings.headers else f"Bearer {value}"
    return session


def explain_key(settings: TeacherSettings) -> str:
    """Return advice for a server that rejects the key."""
    if given := [*([settings.api_key] if settings.api_key else ()), *settings.headers.values()]:
        return f"set these environment variables to values that this server accepts: {', '.join(given)}."
    return (
        "set opd.teacher.api_key (rft: --api-key) to the name of the environment variable that holds the server's key."
    )


def request(session: requests.Session, url: str, body: Mapping[str, Any] | None, deadline: float) -> requests.Response:
    """Get, or post a body as JSON, until a deadline in seconds of ``time.monotonic``.

    Raises:
        requests.RequestException: the server is not reachable, or the answer is truncated or late.
    """
    left = max(deadline - time.monotonic(), 0.01)
    method, timeout = "GET" if body is None else "POST", (min(CONNECT, left), left)
    return session.request(method, url, json=body, timeout=timeout, allow_redirects=False)


def _read_pause(answer: requests.Response, usual: float) -> float:
    """Read the Retry-After header, a number or a date, as the seconds to wait before the next attempt."""
    with suppress(InvalidHeader):
        return float(Retry().parse_retry_after(answer.headers.get("Retry-After", "")))
    return usual


def parse_object(text: bytes, url: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        TeacherError: the text is not a JSON object.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TeacherError(f"{url} sent no JSON object: {shorten(text)}")
    return found


def read_log_probs(entries: Any, row: Row, url: str = "") -> list[float]:
    """Read the log-probs of a sequence's response from vLLM's ``prompt_logprobs``, looked up by the ids that were sent.

    Raises:
        TeacherError: a position is missing, has another token, or is not a number.
    """
    ids = (*row.prompt, *row.response)
    where = f"the teacher at {url}, sequence {row.number}"
    try:
        first, *rest = entries
        found = [entry[str(token)]["logprob"] for entry, token in zip(rest, ids[1:], strict=True)]
    except (TypeError, KeyError, ValueError):
        first, found = "", []
    if first is not None:
        shown = shorten(repr(entries))
        raise TeacherError(f"{where}: prompt_logprobs do not match the {len(ids)} tokens that were sent: {shown}")
    for place, value in enumerate(found, 1):
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value > 1e-3:
            raise TeacherError(f"{where}, position {place}: the log-prob is {shorten(repr(value))}.")
    return [-math.inf if value <= EXCLUDED else float(value) for value in found[len(row.prompt) - 1 :]]


def _name(rows: Sequence[Row]) -> str:
    if len(rows) == 1:
        return f"sequence {rows[0].number}"
    return f"{len(rows)} sequences from {rows[0].number} to {rows[-1].number}"


def shorten(text: str | bytes) -> str:
    """Shorten an answer for a message. Secrets are redacted first, because part of a secret would not be recognised."""
    shown = text[:4096].decode(errors="replace") if isinstance(text, bytes) else text[:4096]
    return " ".join(redact_text(shown).split())[:300]
