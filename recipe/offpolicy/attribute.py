"""Attribute the mismatch of a recorded run to backend, staleness, routing and drift, and name its causes.

    python -m recipe.offpolicy.attribute DIR [--steps FIRST:LAST] [--worst N] [--tokenizer FOLDER] [--png FILE]
                                             [--html FILE] [--json] [--jobs N | --ray ADDRESS]

Reads a recording from the directory that was given as offpolicy.record.dir. Exit status: 0, or 2 if the recording or an
argument is invalid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .command_line import (
    TOKENIZER,
    add_jobs,
    list_output_modules,
    name_program,
    parse_count,
    read_steps,
    refuse,
    require_modules,
    run,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser().parse_args(arguments)
    require_modules("attribute", "torch", "pyarrow", "polars", "xxhash", "hydra", *list_output_modules(options))
    from .analysis import plotting
    from .analysis.attribution.attribution import attribute
    from .analysis.attribution.attribution_page import build_page, draw_overview
    from .analysis.jobs import JobsError, prepare_process, read_arguments
    from .analysis.table import to_plain
    from .recording import Recording, RecordingError

    prepare_process()
    try:
        plotting.check_outputs(options, "attribution")
        recording = Recording(options.directory)
        jobs = read_arguments(options, recording, recording.choose_steps(options.steps))
        found = attribute(recording, steps=options.steps, worst=options.worst, jobs=jobs, tokenizer=options.tokenizer)
        if options.png:
            plotting.save(draw_overview(found), options.png)
        if options.html:
            build_page(found, str(options.directory)).write(options.html)
    except (RecordingError, plotting.PageError, JobsError, OSError) as error:
        return refuse("attribute", error)
    if options.json:
        print(json.dumps(to_plain(found), allow_nan=False))  # noqa: T201
    else:
        _show(found)
    return 0


def _show(found: Any) -> None:
    """Print the tables, the verdict and the fixes."""
    from .analysis.attribution import attribution_page as tables
    from .analysis.table import open_console, print_blocks

    print_blocks(
        open_console(),
        tables.build_causes_table(found),
        tables.build_shares_table(found.whole),
        tables.build_steps_table(dict(found.by_step)),
        tables.build_versions_table(found),
        *tables.build_profile_tables(found, least=1),
        tables.build_tokens_table(found),
        tables.build_rows_table(found),
        tables.format_replayed(found.whole),
        f"Ids are shown instead of text: {found.without_text}." if found.without_text else "",
        tables.format_verdict(found),
        *tables.list_fixes(found),
    )


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    about = "Attribute the mismatch of a recorded run to its sources and causes."
    parser = argparse.ArgumentParser(prog=name_program("attribute"), description=about)
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="the recording: the directory named by offpolicy.record.dir")
    steps = "steps to read: one number, or a range whose start or end may be left out (default: all)"
    add("--steps", type=read_steps, metavar="FIRST:LAST", help=steps)
    add(
        "--worst",
        type=partial(parse_count, least=0),
        default=12,
        metavar="N",
        help="tokens and rows to list (12)",
    )
    add("--tokenizer", default="", metavar="FOLDER", help=TOKENIZER)
    add("--png", type=Path, metavar="FILE", help="write the picture")
    add("--html", type=Path, metavar="FILE", help="write a self-contained page")
    add("--json", action="store_true", help="print everything as JSON")
    add_jobs(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
