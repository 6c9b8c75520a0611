"""The command line: Hydra overrides in, tables, a picture, a page or JSON out."""
# ruff: noqa: E402 - what may be missing is imported below what says so

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..command_line import need, needed_to_show, run

need("whatif", "numpy", "torch", "pyarrow", "hydra")

import torch

from ..correction import SpecError
from ..pages import PageError, check_target, fitted
from ..recording import Recording, RecordingError
from . import show
from .candidates import RECORDED, UNCORRECTED, Candidate, candidates
from .document import document
from .results import Study
from .study import study

MISMATCH, BAD_INPUT = 1, 2
"""Exit status: the replay of what acted is not what was recorded; nothing could be replayed."""
_NAME = "python -m recipe.offpolicy.whatif"
_PIPE_WIDTH = 170


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, 0 where everything is well."""
    given = _parser().parse_args(arguments)
    need("whatif", *needed_to_show(json=given.json, png=bool(given.png), html=bool(given.html)))
    # Blocks fit the cache: a second thread adds little, and waits for the first at each of some hundred operations.
    torch.set_num_threads(1)
    try:
        if given.png:
            check_target("--png", given.png, "whatif.png")
        if given.html:
            check_target("--html", given.html, "whatif.html")
        result = _study(given)
        _show(result, given)
    except BrokenPipeError:
        raise
    except (RecordingError, SpecError, PageError) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename or given.directory}: {error.strerror or error}.")
    if all(outcome.candidate.label == UNCORRECTED for outcome in result.outcomes):
        return BAD_INPUT
    return 0 if result.fidelity.agrees else MISMATCH


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


def _study(given: argparse.Namespace) -> Study:
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


def _show(result: Study, given: argparse.Namespace) -> None:
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


def _refuse(reason: str) -> int:
    sys.stderr.write(f"whatif: {reason}\n")
    return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_NAME,
        description="Replay corrections over recorded steps: what they keep, weigh and cost.",
        epilog="What a mask buys is the column 'mismatch left', the share of KL(mu, pi) that lies on tokens which "
        "still get a gradient: the further below 'tokens kept', the better it picks the tokens that are off. What it "
        "costs are the bias columns, distances from the untruncated weights pi / mu.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the recording: what offpolicy.record.dir named")
    parser.add_argument(
        "--spec", action="append", nargs="+", default=[], metavar="OVERRIDE",
        help=f"Hydra overrides of one correction, as for a launch, or '{RECORDED}', what acted; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--grid", action="extend", nargs="+", default=[], metavar="KEY=VALUE,VALUE",
        help="values to try of a key; several are crossed, on every --spec that has the key",
    )  # fmt: skip
    parser.add_argument("--steps", metavar="FIRST:LAST", help="both included; default: all")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw it")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page that needs no network")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    return parser


if __name__ == "__main__":
    sys.exit(run("whatif", main))
