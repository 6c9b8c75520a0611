"""Body of the what-if command: it parses the steps, replays them, and writes tables or JSON, figure and page."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys

from ...recording import Recording
from ..jobs import read_arguments
from ..table import open_console, print_blocks
from . import whatif_page
from .candidates import RECORDED, UNCORRECTED, Candidate, build_candidates
from .outcomes import Study, build_document
from .study import run_study


def run_from_arguments(given: argparse.Namespace) -> Study:
    """Replay the corrections over the steps that the command line names.

    Raises:
        RecordingError, SpecError: a recording or a correction cannot be read.
    """
    recording = Recording(given.directory)
    steps = recording.choose_steps(given.steps)
    # Grid keys are checked against the correction that was active first; each step is replayed with its own correction.
    first = recording.part(steps[0], 0).spec
    specs = given.spec or [[RECORDED]]
    asked = build_candidates(specs, given.grid, first)
    if given.html:
        for line in whatif_page.describe_left_out(1 + sum(one.error is None for one in asked)):
            sys.stderr.write(f"whatif: {line}\n")
    baseline = Candidate(UNCORRECTED, UNCORRECTED)
    return run_study(recording, steps, (baseline, *asked), jobs=read_arguments(given, recording, steps))


def write_result(result: Study, given: argparse.Namespace) -> None:
    """Write tables or JSON first, so that the replay is not lost if a figure or the page fails."""
    try:
        found = json.dumps(build_document(result), indent=2, allow_nan=False) + "\n" if given.json else _tables(result)
        sys.stdout.write(found)
        sys.stdout.flush()
    except BrokenPipeError:
        # The files must still be written after the reader has closed the pipe, so the rest of the buffer is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    _write(result, given)


def _write(result: Study, given: argparse.Namespace) -> None:
    if given.png:
        from ..plotting import save
        from .whatif_page import draw_study

        save(draw_study(result), given.png)
    if given.html:
        from . import whatif_page

        whatif_page.write_page(result, given.html)


def _tables(result: Study) -> str:
    """Format the tables as text, because Rich would end the program if a reader closed the pipe."""
    console = open_console()
    shown = [
        whatif_page.build_overall_table(result),
        whatif_page.build_group_table(result),
        *itertools.islice(whatif_page.build_agreement_tables(result), 1),
    ]
    if result.failures:
        shown.append(whatif_page.build_failure_table(result))
    style = None if result.fidelity.agrees else "bold red"
    with console.capture() as captured:
        for table in shown:
            print_blocks(console, table)
        console.print(whatif_page.describe_fidelity(result.fidelity), style=style, markup=False, highlight=False)
        for note in [*result.notes, *whatif_page.describe_left_out(len(result.outcomes))]:
            console.print(note, style="yellow", markup=False, highlight=False)
    return captured.get()
