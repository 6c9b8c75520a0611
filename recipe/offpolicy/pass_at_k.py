"""Estimate pass@k from verl's validation dumps without bias, extrapolate it with a fit, and rank checkpoints.

python -m recipe.offpolicy.pass_at_k DUMP... --k 1,8,64 --extrapolate 256,1024 --rank

Exit status: 0, or 2 if a dump or an argument is invalid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .command_line import list_output_modules, name_program, parse_count, parse_score, refuse, require_modules, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser().parse_args(arguments)
    require_modules("pass_at_k", "torch", *list_output_modules(options))
    from .analysis import pass_at_k as analysis
    from .analysis.plotting import check_outputs, save
    from .extensions.pass_at_k.estimates import Stopping

    try:
        check_outputs(options, "pass_at_k")
        if (options.looks is None) != (options.successes is None):
            raise ValueError("--looks and --successes belong together: give both, or neither.")
        stopping = None if options.looks is None else Stopping(tuple(options.looks), options.successes)
        steps = analysis.read_dumps(options.dumps, correct_at_least=options.correct_at_least)
        how = {"extrapolate": options.extrapolate, "stopping": stopping, "ranking": options.rank}
        found = [analysis.estimate(counts, options.k, **how) for counts in steps]
        ranking = None
        if options.rank and len(steps) > 1:
            ranking = analysis.rank_checkpoints(steps, max((*options.k, *options.extrapolate)), stopping=stopping)
        if options.png is not None:
            save(analysis.draw_curves(found), options.png)
    except (ValueError, OSError) as error:  # all errors of dumps, ranking and pages are ValueErrors
        return refuse("pass_at_k", error)
    if options.json:
        places = analysis.build_places(ranking) if ranking else {}
        shown = [analysis.build_json(each) | ({"ranking": places[each.name]} if ranking else {}) for each in found]
        print(json.dumps(shown, indent=2))  # noqa: T201
        return 0
    from .analysis.table import open_console, print_blocks

    console = open_console()
    for each in found:
        print_blocks(console, analysis.build_table(each), *each.notes, wrap=True)
    if ranking:
        print_blocks(console, analysis.build_ranking(ranking), *analysis.list_notes(ranking), wrap=True)
    return 0


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
    add("--png", type=Path, metavar="FILE", help="write the curve")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
