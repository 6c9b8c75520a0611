"""Estimate pass@k from verl's validation dumps without bias, extrapolate it with a fit, and rank checkpoints.

python -m recipe.offpolicy.pass_at_k DUMP... --k 1,8,64 --extrapolate 256,1024 --rank

Exit status: 0, or 2 if a dump or an argument is invalid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .command_line import Output, add_outputs, name_program, parse_count, parse_score, run, run_tool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    modules = ("torch", "numpy", "pyarrow", "xxhash")
    return run_tool("pass_at_k", build_parser().parse_args(arguments), modules, _estimate)


def _estimate(options: argparse.Namespace) -> Output:
    from .analysis import AnalysisError
    from .analysis import pass_at_k as analysis
    from .extensions.pass_at_k.estimates import Stopping

    if (options.looks is None) != (options.successes is None):
        raise AnalysisError("--looks and --successes belong together: give both, or neither.")
    ranking = None
    try:
        steps = analysis.read_dumps(options.dumps, correct_at_least=options.correct_at_least)
        stopping = None if options.looks is None else Stopping(tuple(options.looks), options.successes)
        how = {"extrapolate": options.extrapolate, "stopping": stopping, "ranking": options.rank}
        found = [analysis.estimate(counts, options.k, **how) for counts in steps]
        if options.rank and len(steps) > 1:
            ranking = analysis.rank_checkpoints(steps, max((*options.k, *options.extrapolate)), stopping=stopping)
    except ValueError as error:  # not a dump, or counts that are impossible under the stopping rule
        raise AnalysisError(str(error)) from error
    blocks = analysis.build_blocks(found, ranking)
    return Output("pass@k", lambda: {"pass@k": blocks}, lambda: analysis.build_document(found, ranking))


def parse_counts(text: str) -> list[int]:
    """Parse comma-separated counts, and sort them in ascending order.

    Raises:
        ArgumentTypeError: the text is not a list of counts.
    """
    return sorted({parse_count(part.strip()) for part in text.split(",")})


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(prog=name_program("pass_at_k"), description="pass@k from verl's validation dumps.")
    add = parser.add_argument
    files = "files of trainer.validation_data_dir, such as 100.jsonl"
    add("dumps", metavar="DUMP", nargs="+", type=Path, help=files)
    add("--k", type=parse_counts, default=[1, 8], metavar="K,...", help="k up to the number of samples (1,8)")
    beyond = "k beyond the number of samples, by a Beta-binomial fit"
    add("--extrapolate", type=parse_counts, default=[], metavar="K,...", help=beyond)
    score = "smallest score that counts as correct (1.0)"
    add("--correct-at-least", type=parse_score, default=1.0, metavar="SCORE", help=score)
    looks = "cumulative samples after which sampling could end early"
    add("--looks", type=parse_counts, metavar="N,...", help=looks)
    add("--successes", type=parse_count, metavar="R", help="number of correct samples at which it ended")
    add("--rank", action="store_true", help="rank checkpoints at the largest k, and show 1 - (1 - c/n)^k")
    add_outputs(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
