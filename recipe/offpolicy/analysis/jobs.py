"""Processing of a recording's steps in order, in this process, other local processes, or tasks of a Ray cluster."""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Final, TypeVar

from ..recording import Recording, Step
from . import AnalysisError

Item = TypeVar("Item")
Result = TypeVar("Result")
LARGE: Final = 64e6
"""Total file size, in bytes, above which several processes save more time than they take to start."""
AHEAD: Final = 2
"""Number of items in progress per process. Their results stay in memory until they can be yielded in order."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST_KEPT, _MOST_KEPT = 32 * 2**20, 256 * 2**20
"""Size in bytes of the largest allocation that glibc keeps after it is freed (glibc's own maximum), and the limit on
everything that it keeps."""


@dataclass(frozen=True)
class Jobs:
    """The processes that work on a recording's steps.

    Attributes:
        count: number of processes on this machine; with 1, only this process is used.
        ray: address of a running Ray cluster whose tasks do the work instead; None for no cluster. The cluster's nodes
            need this package, and the recording under the same path. The first ``map`` connects this process to the
            cluster if it is not connected yet; the connection lasts until the process ends.
    """

    count: int = 1
    ray: str | None = None

    def map(self, work: Callable[[Item], Result], items: Sequence[Item], what: str = "") -> Iterator[Result]:
        """Yield ``work(item)`` for each of ``items``, in their order, with few results in memory at a time.

        Args:
            work: a module-level function, or a partial of one.
            what: name of the work, for a progress bar if standard error is a terminal; empty for no bar.

        Raises:
            AnalysisError: a process died, or there is no cluster at the address.
            Exception: any exception that ``work`` raised.
        """
        found: Iterator[Result]
        if self.ray is not None:
            found = _map_on_ray(work, items, self.ray)
        elif self.count == 1 or len(items) < 2:
            found = map(work, items)
        else:
            found = _map_in_processes(work, items, min(self.count, len(items)))
        if not (what and sys.stderr.isatty()):
            return found
        from rich.console import Console
        from rich.progress import track

        return iter(track(found, what, total=len(items), console=Console(stderr=True), transient=True))


ALONE: Final = Jobs()


def _run_ahead(submit: Callable[[Any, Item], Any], work: Any, items: Iterable[Item], most: int) -> Iterator[Any]:
    """Yield ``submit(work, item)`` for each item, in order, with at most ``most`` items submitted but not yielded."""
    waiting: deque[Any] = deque()
    for item in items:
        waiting.append(submit(work, item))
        if len(waiting) == most:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def _map_in_processes(work: Callable[[Item], Result], items: Sequence[Item], count: int) -> Iterator[Result]:
    pool = ProcessPoolExecutor(count, _prepare_forks(work), initializer=prepare_process)
    try:
        yield from (future.result() for future in _run_ahead(pool.submit, work, items, AHEAD * count))
    except BrokenProcessPool as error:
        raise AnalysisError(
            "a process died. Fix: run with --jobs 1 to see the cause; if memory is short, use fewer jobs."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _prepare_forks(work: Callable[[Item], Result]) -> BaseContext:
    """Return a context that forks processes from a server, which does the imports once for all of them.

    A fork of this process would copy the state of torch's threads at an arbitrary moment.
    """
    context = multiprocessing.get_context("forkserver")
    module = (work.func if isinstance(work, partial) else work).__module__
    context.set_forkserver_preload(["torch", "pyarrow.parquet", module])
    return context


def prepare_process() -> None:
    """Prepare this process for arrays of a few MB: use one thread, and keep freed memory for the next array."""
    import pyarrow
    import torch

    # Blocks fit into the cache, so a second thread adds little, and threads would wait for each other at each of
    # several hundred operations. Numpy's matrix products start threads of their own, which spin while they wait, so
    # each step's work multiplies with torch.
    torch.set_num_threads(1)
    pyarrow.set_cpu_count(1)
    # By default, glibc returns each such array to the system, and fresh pages cost as much as the arithmetic.
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


def _map_on_ray(work: Callable[[Item], Result], items: Sequence[Item], address: str) -> Iterator[Result]:
    import ray

    # A tool connects only once, because each connection starts new workers, which have to import torch again.
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except Exception as error:  # the type depends on what is wrong with the address
            raise AnalysisError(
                f"--ray {address}: no cluster responds at this address ({error}). Fix: pass the address that `ray "
                "start` printed."
            ) from error
    task = ray.remote(num_cpus=1)(_run_alone)
    most = AHEAD * max(int(ray.cluster_resources().get("CPU", 1)), 1)
    for found in _run_ahead(task.remote, ray.put(work), items, most):
        try:
            result = ray.get(found)
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except ray.exceptions.RayError as error:
            raise AnalysisError(f"a task on the cluster at {address} died: {error}") from error
        yield result


def _run_alone(work: Callable[[Item], Result], item: Item) -> Result:
    prepare_process()
    return work(item)


def read_arguments(options: argparse.Namespace, recording: Recording, steps: Sequence[int]) -> Jobs:
    """Read ``--jobs`` and ``--ray``; by default, several processes work on a recording of at least ``LARGE`` bytes."""
    if options.jobs is not None or options.ray is not None:
        return Jobs(options.jobs or 1, options.ray)
    size = sum(path.stat().st_size for step in steps for path in recording.files[step])
    return Jobs(len(os.sched_getaffinity(0)) if size >= LARGE else 1)


def map_steps(
    work: Callable[[Iterable[Step]], Result],
    steps: Iterable[Step],
    jobs: Jobs,
    what: str,
    *,
    in_pieces: bool = False,
) -> Iterator[Result]:
    """Yield the result of ``work`` for each step, in order, with a progress bar.

    Args:
        work: a module-level function, or a partial of one, that receives one step, once for each correction that was
            active in it.
        steps: a recording, or separate steps in memory; the latter are processed only in this process.
        what: name of the work, for the progress bar.
        in_pieces: whether to pass a large step of a recording to ``work`` piece by piece; see ``Recording.pieces``.
    """
    if not isinstance(steps, Recording):
        return (work([step]) for step in steps)
    reader = steps.in_pieces() if in_pieces else steps
    return jobs.map(work, [reader.only(number) for number in steps.steps], what)
