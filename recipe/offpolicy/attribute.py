"""Attribute the mismatch of a recorded run to backend, staleness, routing and drift, and name its causes.

    python -m recipe.offpolicy.attribute DIR [--steps FIRST:LAST] [--worst N] [--tokenizer FOLDER] [--png FILE]
                                             [--html FILE] [--json] [--jobs N | --ray ADDRESS]

Reads a recording from the directory that was given as offpolicy.record.dir. Exit status: 0, or 2 if the recording or an
argument is invalid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from .command_line import (
    TOKENIZER,
    Output,
    add_outputs,
    add_recording,
    add_steps,
    name_program,
    parse_count,
    run,
    run_tool,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    modules = ("torch", "pyarrow", "polars", "xxhash", "hydra")
    return run_tool("attribute", build_parser().parse_args(arguments), modules, _attribute)


def _attribute(options: argparse.Namespace) -> Output:
    from .analysis.attribution.attribution import attribute
    from .analysis.attribution.attribution_page import build_sections
    from .analysis.attribution.worst_examples import escape
    from .analysis.jobs import read_arguments
    from .recording import Recording

    recording = Recording(options.directory)
    jobs = read_arguments(options, recording, recording.choose_steps(options.steps))
    found = attribute(recording, steps=options.steps, worst=options.worst, jobs=jobs, tokenizer=options.tokenizer)
    facts = {
        "steps": f"{found.steps[0]} to {found.steps[-1]}",
        "rows": found.rows,
        "tokens": found.whole.tokens,
        "KL(mu, pi), nats per token": found.whole.kl.whole,
        "variance of log pi/mu": found.whole.variance.whole,
    }
    return Output(
        title="Where does the mismatch come from?",
        subtitle=escape(str(options.directory)),
        sections=lambda: {"Recording": [facts], **build_sections(found)},
        document=lambda: found,
    )


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    about = "Attribute the mismatch of a recorded run to its sources and causes."
    parser = argparse.ArgumentParser(prog=name_program("attribute"), description=about)
    add_recording(parser)
    add_steps(parser)
    at_least_0 = partial(parse_count, least=0)
    parser.add_argument("--worst", type=at_least_0, default=12, metavar="N", help="tokens and rows to list (12)")
    parser.add_argument("--tokenizer", default="", metavar="FOLDER", help=TOKENIZER)
    add_outputs(parser, html=True)
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
