"""A server with vLLM's interface that scores by a rule, for tests of faults between teacher and trainer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Rule = Callable[[Sequence[int]], list[float]]
"""Token ids -> the log-prob at each position but the first."""


def by_place(ids: Sequence[int]) -> list[float]:
    """-j/100 for the token at position j."""
    return [-place / 100 for place in range(1, len(ids))]


@dataclass
class FakeTeacher:
    """The server's behaviour, and the requests that it received.

    Attributes:
        score: the rule.
        change: gets each answer's ``prompt_logprobs`` and returns what is sent in their place.
        failures: statuses of the first answers; -1: one that is cut short.
        retry_after: Retry-After headers of these.
        raw: sent instead of completions: bytes, or what becomes JSON; ``described``: of models and tokens.
        answered: the model that completions state; None: they state none.
        asked: token ids of each row, in the order of the requests.
        headers: of each request.
    """

    score: Rule = by_place
    change: Callable[[list[Any]], list[Any]] = lambda entries: entries
    failures: list[int] = field(default_factory=list)
    retry_after: list[str] = field(default_factory=list)
    raw: object = None
    described: object = None
    headers: list[Message] = field(default_factory=list)
    models: tuple[str, ...] = ("teacher",)
    answered: str | None = None
    length: int = 128
    tokenize: Callable[[dict[str, Any]], list[int]] = lambda body: []
    asked: list[list[int]] = field(default_factory=list)
    url: str = ""
    answering: threading.Event = field(default_factory=threading.Event)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if self.described is not None:
            return 200, self.described
        if path == "/v1/models":
            return 200, {
                "data": [{"id": name, "root": "weights", "max_model_len": self.length} for name in self.models]
            }
        if path == "/tokenize":
            return 200, {"tokens": self.tokenize(body)}
        if self.failures:
            return self.failures.pop(0), {"error": "not now"}
        self.answering.wait(30)
        if self.raw is not None:
            return 200, self.raw
        rows = body["prompt"]
        self.asked += rows
        stated = {} if self.answered is None else {"model": self.answered}
        return 200, stated | {"choices": [self._choice(number, row) for number, row in enumerate(rows)]}

    def _choice(self, number: int, row: list[int]) -> dict[str, Any]:
        scored = [{str(token): {"logprob": value}} for token, value in zip(row[1:], self.score(row), strict=True)]
        return {"index": number, "prompt_logprobs": self.change([None, *scored])}


@contextmanager
def serving(teacher: FakeTeacher) -> Iterator[FakeTeacher]:
    """Serve the teacher at ``teacher.url``, on its own port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            teacher.headers.append(self.headers)
            self._send(*teacher.answer(self.path, {}))

        def do_POST(self) -> None:
            teacher.headers.append(self.headers)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*teacher.answer(self.path, body))

        def _send(self, status: int, found: Any) -> None:
            text = found if isinstance(found, bytes) else json.dumps(found).encode()
            try:
                self.send_response(status if status > 0 else 200)
                if teacher.retry_after and status in (429, 503):
                    self.send_header("Retry-After", teacher.retry_after.pop(0))
                self.send_header("Content-Length", str(len(text) + 5 * (status < 0)))
                self.end_headers()
                self.wfile.write(text)
            except OSError:  # the client has given up
                pass

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    teacher.url = f"http://127.0.0.1:{server.server_address[1]}"
    teacher.answering.set()
    try:
        yield teacher
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
