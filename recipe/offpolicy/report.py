"""Write a self-contained HTML report about a recorded run.

python -m recipe.offpolicy.report DIR [--out report.html] [--spec OVERRIDE ...]
                                      [--tokenizer FOLDER] [--jobs N | --ray ADDRESS]
                                      [--follow [SECONDS]]

Exit status: 0, or 2 if the recording or an argument is invalid. With --follow, it runs until Ctrl-C and exits with 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from .command_line import TOKENIZER, add_recording, catch_errors, name_program, parse_count, require_modules, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser().parse_args(arguments)
    require_modules("report", "torch", "pyarrow", "polars", "xxhash", "hydra", "rich", "bokeh", "jinja2")
    return catch_errors("report", partial(_write, options))


def _write(options: argparse.Namespace) -> int:
    from .analysis.jobs import read_arguments
    from .analysis.plotting import check_target
    from .analysis.report.report_page import follow, write_page
    from .analysis.report.timeline import build_timeline
    from .analysis.report.verdict import run_studies
    from .correction import CorrectionSpec
    from .recording import Recording, RecordingError

    check_target("--out", options.out, "report.html")
    if options.follow:
        with suppress(KeyboardInterrupt):
            follow(options.directory, options.out, options.follow, partial(print, flush=True))
        return 0
    recording = Recording(options.directory)
    jobs = read_arguments(options, recording, recording.steps)
    timeline = build_timeline(recording, jobs)
    if not timeline.steps:
        raise RecordingError(f"{options.directory}: no response is recorded in any of its steps. Record other steps.")
    recorded, stale = CorrectionSpec.from_mapping(timeline.correction), timeline.is_stale
    studies = run_studies(recording, recorded, stale=stale, spec=options.spec, jobs=jobs, tokenizer=options.tokenizer)
    print(write_page(recording, timeline, options.out, studies))  # noqa: T201
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(prog=name_program("report"), description="One HTML page about a recorded run.")
    add_recording(parser)
    add = parser.add_argument
    add("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: %(default)s")
    spec = "correction to calibrate (default: the recorded correction)"
    add("--spec", nargs="+", default=[], metavar="OVERRIDE", help=spec)
    refresh = (
        "rewrite the page after each step of a run in progress, without attribution, calibration and what-if; a "
        "browser reloads it every SECONDS (default: 10)"
    )
    add("--follow", nargs="?", type=parse_count, const=10, metavar="SECONDS", help=refresh)
    add("--tokenizer", default="", metavar="FOLDER", help=TOKENIZER)
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
