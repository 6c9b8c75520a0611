"""Replay other corrections over recorded steps, and write tables, a figure, a page or JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .command_line import BAD_INPUT, Output, add_outputs, add_recording, add_steps, name_program, run, run_tool

MISMATCH = 1
"""Exit status if the replay differs from the recording; if nothing could be replayed, it is ``BAD_INPUT``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, 0 if the replay agrees with the recording."""
    modules = ("numpy", "torch", "pyarrow", "xxhash", "hydra")
    return run_tool("whatif", build_parser().parse_args(arguments), modules, _replay)


def _replay(options: argparse.Namespace) -> Output:
    from .analysis.jobs import read_arguments
    from .analysis.whatif import whatif_page
    from .analysis.whatif.candidates import RECORDED, UNCORRECTED, Candidate, build_candidates
    from .analysis.whatif.study import run_study
    from .recording import Recording

    recording = Recording(options.directory)
    steps = recording.choose_steps(options.steps)
    # Grid keys are checked against the correction that was active first; each step is replayed with its own correction.
    asked = build_candidates(options.spec or [[RECORDED]], options.grid, recording.part(steps[0], 0).spec)
    jobs = read_arguments(options, recording, steps)
    study = run_study(recording, steps, (Candidate(UNCORRECTED, UNCORRECTED), *asked), jobs=jobs)
    nothing = all(outcome.candidate.label == UNCORRECTED for outcome in study.outcomes)
    return Output(
        title="What if: other corrections on recorded steps",
        subtitle=whatif_page.describe_scope(study),
        sections=lambda: {"Replay": whatif_page.build_blocks(study)},
        document=lambda: whatif_page.build_document(study),
        status=BAD_INPUT if nothing else 0 if study.fidelity.agrees else MISMATCH,
    )


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog=name_program("whatif"),
        description="Replay corrections over recorded steps: what they keep, how they weight tokens, and what they "
        "cost.",
        epilog="The benefit of a mask is shown by the column 'mismatch left', the share of KL(mu, pi) that remains on "
        "tokens which still receive a gradient: the further it is below 'tokens kept', the better the mask "
        "selects deviating tokens. The cost is shown by the bias columns, which are distances from the "
        "untruncated weights pi / mu.",
    )
    add_recording(parser)
    spec = "Hydra overrides of one correction, as for a launch, or 'recorded'; may be repeated"
    parser.add_argument("--spec", action="append", nargs="+", default=[], metavar="OVERRIDE", help=spec)
    grid = "values of a key to try on every --spec that has the key; several grids are combined"
    parser.add_argument("--grid", action="extend", nargs="+", default=[], metavar="KEY=VALUE,VALUE", help=grid)
    add_steps(parser)
    add_outputs(parser, html=True)
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
