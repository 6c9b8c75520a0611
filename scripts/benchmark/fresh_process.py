"""Measurements in a process of their own, so that one leaves nothing behind for the next."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LIMIT = 3600
"""Seconds that one measurement may take."""


def run_in_fresh_process(work: Callable[..., None], *arguments: Any, preload: Sequence[str] | None = None) -> Any:
    """Run ``work`` in a fresh process, with a queue as its last argument; return what it puts there.

    Args:
        preload: modules of a server that has imported them and computed nothing, from which the process is forked;
            None: start Python anew.

    Raises:
        RuntimeError: the process ended without an answer, as one does that is killed for its memory.
    """
    context: Any = multiprocessing.get_context("spawn" if preload is None else "forkserver")
    if preload is not None:
        context.set_forkserver_preload(list(preload))
    answer = context.Queue()
    process = context.Process(target=work, args=(*arguments, answer))
    process.start()
    for _ in range(LIMIT):
        process.join(1)
        if not answer.empty():
            found = answer.get()
            process.join()
            return found
        if process.exitcode is not None and answer.empty():
            raise RuntimeError(f"{work.__name__}{arguments}: its process ended with {process.exitcode} and no answer.")
    process.kill()
    raise RuntimeError(f"{work.__name__}{arguments}: no answer in {LIMIT} s.")


def measure_growth(call: Callable[[], Any]) -> int:
    """Measure the bytes that this process's resident set grows by at most in one call."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be taken again, unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _read_status("VmRSS")
    call()
    return _read_status("VmHWM") - before


def _read_status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
