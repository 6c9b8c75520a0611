"""Replay other corrections over recorded steps, and write tables, a figure, a page or JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .command_line import add_jobs, list_output_modules, name_program, read_steps, refuse, require_modules, run

MISMATCH, BAD_INPUT = 1, 2
"""Exit status if the replay differs from the recording, and if nothing could be replayed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, 0 if the replay agrees with the recording."""
    given = build_parser().parse_args(arguments)
    require_modules("whatif", "numpy", "torch", "pyarrow", "xxhash", "hydra", *list_output_modules(given))
    from .analysis.jobs import JobsError, prepare_process
    from .analysis.plotting import PageError, check_outputs
    from .analysis.whatif.candidates import UNCORRECTED
    from .analysis.whatif.whatif_command import run_from_arguments, write_result
    from .correction import SpecError
    from .recording import RecordingError

    prepare_process()
    try:
        check_outputs(given, "whatif")
        result = run_from_arguments(given)
        write_result(result, given)
    except BrokenPipeError:
        raise
    except (RecordingError, SpecError, PageError, JobsError) as error:
        return refuse("whatif", error)
    except OSError as error:
        return refuse("whatif", f"{error.filename or given.directory}: {error.strerror or error}.")
    if all(outcome.candidate.label == UNCORRECTED for outcome in result.outcomes):
        return BAD_INPUT
    return 0 if result.fidelity.agrees else MISMATCH


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
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="the recording: the directory named by offpolicy.record.dir"
    )
    parser.add_argument(
        "--spec", action="append", nargs="+", default=[], metavar="OVERRIDE",
        help="Hydra overrides of one correction, as for a launch, or 'recorded'; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--grid", action="extend", nargs="+", default=[], metavar="KEY=VALUE,VALUE",
        help="values of a key to try; several grids are crossed, on every --spec that has the key",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=read_steps, metavar="FIRST:LAST", help="steps to replay, both ends included; default: all"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the results")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page that needs no network")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_jobs(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run("whatif", main))
