"""What the command line asks for: a study of some steps, and its tables or JSON, picture and page."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence

from ...recording import Recording, RecordingError
from ..pages import fitted
from . import show
from .candidates import RECORDED, UNCORRECTED, Candidate, candidates
from .document import document
from .results import Study
from .study import study

_PIPE_WIDTH = 170


def chosen_steps(recorded: Sequence[int], steps: str | None) -> list[int]:
    """Those of the recorded steps that ``first:last`` names, both included and either left out, or a number alone.

    Raises:
        RecordingError: it is malformed, or names no recorded step.
    """
    if steps is None:
        return list(recorded)
    found = re.fullmatch(r"(\d*)(:?)(\d*)", steps.strip())
    if found is None or steps.strip() in ("", ":"):
        raise RecordingError(f"--steps {steps}: expected first:last, such as 10:20, 10: or :20, or one number.")
    first = int(found[1] or 0)
    last = int(found[3]) if found[3] else recorded[-1] if found[2] else first
    chosen = [step for step in recorded if first <= step <= last]
    if not chosen:
        raise RecordingError(
            f"--steps {steps}: no recorded step is among them. Recorded: {recorded[0]} to {recorded[-1]}."
        )
    return chosen


def replayed(given: argparse.Namespace) -> Study:
    """The corrections that the command line names, over the steps that it names.

    Raises:
        RecordingError, SpecError: one of them cannot be read.
    """
    recording = Recording(given.directory)
    steps = chosen_steps(recording.steps, given.steps)
    first = recording.parts(steps[0])[0].spec
    specs = given.spec or [[RECORDED]]
    asked = candidates(specs, given.grid, first)
    if given.html:
        for line in show.left_out(1 + sum(one.error is None for one in asked)):
            sys.stderr.write(f"whatif: {line}\n")
    baseline = Candidate(UNCORRECTED, UNCORRECTED)
    with _progress(len(steps), shown=not given.json) as step:
        return study(recording, steps, (baseline, *asked), progress=lambda _: step())


def show_result(result: Study, given: argparse.Namespace) -> None:
    """Tables or JSON first, so that a picture or page which cannot be made loses nothing of the replay."""
    try:
        found = json.dumps(document(result), indent=2, allow_nan=False) + "\n" if given.json else _tables(result)
        sys.stdout.write(found)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has enough, and files are wanted all the same. What is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    _write(result, given)


def _write(result: Study, given: argparse.Namespace) -> None:
    if given.png:
        from . import draw

        draw.save(draw.draw(result), given.png)
    if given.html:
        from . import html

        html.write(result, given.html)


def _tables(result: Study) -> str:
    """As they are printed; Rich would end the program where a reader closes the pipe."""
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    shown = [show.overall_table(result), show.group_table(result), *itertools.islice(show.agreement_tables(result), 1)]
    if result.failures:
        shown.append(show.failure_table(result))
    style = None if result.fidelity.agrees else "bold red"
    with console.capture() as captured:
        for table in shown:
            console.print(*fitted(table, console.width), sep="\n")
        console.print(show.fidelity_sentence(result.fidelity), style=style, markup=False, highlight=False)
        for note in [*result.notes, *show.left_out(len(result.outcomes))]:
            console.print(note, style="yellow", markup=False, highlight=False)
    return captured.get()


@contextlib.contextmanager
def _progress(steps: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Calls to what it yields move a bar on the terminal's standard error."""
    if not (shown and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying", total=steps)
        yield lambda: progress.advance(task)
