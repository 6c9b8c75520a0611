"""Replay other corrections over recorded steps, and write tables, a figure, a page or JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .command_line import add_jobs, list_output_modules, name_program, read_steps, refuse, require_modules, run

if TYPE_CHECKING:
    from .analysis.whatif.study import Study

MISMATCH, BAD_INPUT = 1, 2
"""Exit statuses if the replay differs from the recording, and if nothing could be replayed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, 0 if the replay agrees with the recording."""
    given = build_parser().parse_args(arguments)
    require_modules("whatif", "numpy", "torch", "pyarrow", "xxhash", "hydra", *list_output_modules(given))
    from .analysis.jobs import JobsError, prepare_process
    from .analysis.plotting import PageError, check_outputs
    from .analysis.whatif.candidates import UNCORRECTED
    from .correction import SpecError
    from .recording import RecordingError

    prepare_process()
    try:
        check_outputs(given, "whatif")
        result = _replay(given)
        _write(result, given)
    except BrokenPipeError:
        raise
    except (RecordingError, SpecError, PageError, JobsError, OSError) as error:
        return refuse("whatif", error)
    if all(outcome.candidate.label == UNCORRECTED for outcome in result.outcomes):
        return BAD_INPUT
    return 0 if result.fidelity.agrees else MISMATCH


def _replay(given: argparse.Namespace) -> Study:
    from .analysis.jobs import read_arguments
    from .analysis.whatif.candidates import RECORDED, UNCORRECTED, Candidate, build_candidates
    from .analysis.whatif.study import run_study
    from .recording import Recording

    recording = Recording(given.directory)
    steps = recording.choose_steps(given.steps)
    # Grid keys are checked against the correction that was active first; each step is replayed with its own correction.
    asked = build_candidates(given.spec or [[RECORDED]], given.grid, recording.part(steps[0], 0).spec)
    jobs = read_arguments(given, recording, steps)
    return run_study(recording, steps, (Candidate(UNCORRECTED, UNCORRECTED), *asked), jobs=jobs)


def _write(result: Study, given: argparse.Namespace) -> None:
    """Write tables or JSON first, so that the replay is not lost if a figure or the page fails."""
    from .analysis import plotting
    from .analysis.whatif import whatif_page

    try:
        if given.json:
            sys.stdout.write(json.dumps(whatif_page.build_document(result), indent=2, allow_nan=False) + "\n")
        else:
            from .analysis.table import open_console, print_blocks

            console = open_console()
            # Rich would end the program if a reader closed the pipe.
            with console.capture() as captured:
                print_blocks(console, *whatif_page.build_blocks(result))
            sys.stdout.write(captured.get())
        sys.stdout.flush()
    except BrokenPipeError:
        # The files must still be written after the reader has closed the pipe, so the rest of the buffer is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if given.png:
        plotting.save(whatif_page.draw_study(result), given.png)
    if given.html:
        whatif_page.build_page(result).write(given.html)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog=name_program("whatif"),
        description="Replay corrections over recorded steps: what they keep, weigh and cost.",
        epilog="The benefit of a mask is shown by the column 'mismatch left', the share of KL(mu, pi) that remains on "
        "tokens which still receive a gradient: the further it is below 'tokens kept', the better the mask "
        "selects deviating tokens. The cost is shown by the bias columns, which are distances from the "
        "untruncated weights pi / mu.",
    )
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path, help="the recording: the directory named by offpolicy.record.dir")
    spec = "Hydra overrides of one correction, as for a launch, or 'recorded'; may be repeated"
    add("--spec", action="append", nargs="+", default=[], metavar="OVERRIDE", help=spec)
    grid = "values of a key to try on every --spec that has the key; several grids are combined"
    add("--grid", action="extend", nargs="+", default=[], metavar="KEY=VALUE,VALUE", help=grid)
    steps = "steps to replay, both ends included; default: all"
    add("--steps", type=read_steps, metavar="FIRST:LAST", help=steps)
    add("--png", type=Path, metavar="FILE", help="draw the results")
    add("--html", type=Path, metavar="FILE", help="write one page that needs no network")
    add("--json", action="store_true", help="print JSON instead of tables")
    add_jobs(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
