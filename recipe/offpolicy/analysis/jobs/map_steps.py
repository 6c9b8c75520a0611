"""A function over the steps of a recording, read where it works, or over steps in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ...recording import Recording, Step
from .jobs import Jobs
from .progress import show_progress

Result = TypeVar("Result")


def map_steps(
    work: Callable[[Iterable[Step]], Result],
    steps: Iterable[Step],
    jobs: Jobs,
    what: str,
    *,
    in_pieces: bool = False,
) -> Iterator[Result]:
    """Yield ``work`` of each step, in order, with a progress bar.

    Args:
        work: takes one step, which comes once for each correction that acted in it; of a module, or a partial of one.
        steps: a recording, or steps in memory, each by itself, which this process works on.
        what: is done, for the bar.
        in_pieces: a large step of a recording comes to ``work`` piece by piece, see ``Recording.pieces``.
    """
    if not isinstance(steps, Recording):
        return (work([step]) for step in steps)
    reader = steps.in_pieces() if in_pieces else steps
    alone = [reader.only(number) for number in steps.steps]
    return show_progress(jobs.map(work, alone), len(alone), what)
