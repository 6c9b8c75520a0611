"""The teacher of a run with on-policy distillation: a vLLM server of the quickstart's own, better model."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from .processes import TICK, Child, StageFailed

SCRIPT = Path(__file__).resolve().parents[1] / "teacher.sh"
SECONDS = 300.0
"""Until it serves; about 40 on two idle cores."""
LENGTH = 128
"""Longest sequence; prompt and response have 74 tokens, and one is decoded."""


class Teacher:
    """A server that is starting, and ends with the quickstart's other processes.

    Args:
        model: folder of the model.
        env: as the trainer has it.
        log: where its output goes.
        root: of the checkout.
    """

    def __init__(self, model: Path, env: Mapping[str, str], log: Path, root: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        arguments = [str(model), "--port", str(port), "--max-model-len", str(LENGTH)]
        self.child = Child(["bash", str(SCRIPT), *arguments], env, log, root)

    def wait(self, on_tick: Callable[[], None]) -> Iterator[float]:
        """Wait until it serves; yields the seconds so far every ten.

        Raises:
            StageFailed: it ended, or does not serve in time.
        """
        start = told = time.monotonic()
        while not _answers(f"{self.url}/health"):
            on_tick()
            if self.child.process.poll() is not None:
                raise StageFailed(f"a teacher that ended with {self.child.process.returncode}, see {self.child.log}")
            if time.monotonic() - start > SECONDS:
                raise StageFailed(f"a teacher that does not serve within {SECONDS:.0f} s, see {self.child.log}")
            if time.monotonic() - told > 10:
                told = time.monotonic()
                yield told - start
            time.sleep(TICK)


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError), opener.open(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False
