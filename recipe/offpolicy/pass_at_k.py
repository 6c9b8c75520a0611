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

from .command_line import (
    BAD_INPUT,
    list_output_modules,
    name_program,
    parse_count,
    parse_score,
    require_modules,
    run,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser().parse_args(arguments)
    require_modules("pass_at_k", "torch", *list_output_modules(json=options.json, png=bool(options.png), html=False))
    from .analysis.pass_at_k.dumps import build_json, build_table, draw_curves, estimate, read_dumps
    from .analysis.pass_at_k.ranking import RankingError, build_places, build_ranking, list_notes, rank_checkpoints
    from .analysis.plotting import PageError, check_target
    from .extensions.pass_at_k.summary import Stopping
    from .extensions.sessions import DumpError

    try:
        if options.png is not None:
            check_target("--png", options.png, "pass_at_k.png")
        if (options.looks is None) != (options.successes is None):
            raise ValueError("--looks and --successes belong together: give both, or neither.")
        stopping = None if options.looks is None else Stopping(tuple(options.looks), options.successes)
        steps = read_dumps(options.dumps, correct_at_least=options.correct_at_least)
        found = [
            estimate(counts, options.k, extrapolate=options.extrapolate, stopping=stopping, ranking=options.rank)
            for counts in steps
        ]
        ranking = None
        if options.rank and len(steps) > 1:
            ranking = rank_checkpoints(steps, max((*options.k, *options.extrapolate)), stopping=stopping)
        if options.png is not None:
            from .analysis.plotting import save

            save(draw_curves(found), options.png)
    except (DumpError, PageError, RankingError, ValueError, OSError) as error:
        print(f"pass_at_k: {error}", file=sys.stderr)  # noqa: T201
        return BAD_INPUT
    if options.json:
        places = build_places(ranking) if ranking else {}
        shown = [build_json(each) | ({"ranking": places[each.name]} if ranking else {}) for each in found]
        print(json.dumps(shown, indent=2))  # noqa: T201
        return 0
    from .analysis.table import open_console, print_blocks

    console = open_console()
    for each in found:
        print_blocks(console, build_table(each), *each.notes, wrap=True)
    if ranking:
        print_blocks(console, build_ranking(ranking), *list_notes(ranking), wrap=True)
    return 0


def parse_counts(text: str) -> list[int]:
    """Parse comma-separated counts, and sort them in ascending order.

    Raises:
        ArgumentTypeError: the text is not a list of counts.
    """
    try:
        found = sorted({int(part) for part in text.split(",") if part})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: expected counts such as 1,8,64") from error
    if not found or found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected counts such as 1,8,64")
    return found


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(prog=name_program("pass_at_k"), description="pass@k from verl's validation dumps.")
    parser.add_argument(
        "dumps", metavar="DUMP", nargs="+", type=Path, help="files of trainer.validation_data_dir, such as 100.jsonl"
    )
    parser.add_argument(
        "--k", type=parse_counts, default=[1, 8], metavar="K,...", help="k up to the number of samples (1,8)"
    )
    parser.add_argument(
        "--extrapolate",
        type=parse_counts,
        default=[],
        metavar="K,...",
        help="k beyond the number of samples, by a Beta-binomial fit",
    )
    parser.add_argument(
        "--correct-at-least",
        type=parse_score,
        default=1.0,
        metavar="SCORE",
        help="smallest score that counts as correct (1.0)",
    )
    parser.add_argument(
        "--looks", type=parse_counts, metavar="N,...", help="cumulative samples after which sampling could end early"
    )
    parser.add_argument(
        "--successes", type=parse_count, metavar="R", help="number of correct samples at which it ended"
    )
    parser.add_argument(
        "--rank", action="store_true", help="rank checkpoints at the largest k, and show 1 - (1 - c/n)^k"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the curve")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(run("pass_at_k", main))
