"""Show answer lengths by correctness over the steps of runs or recordings, and by class over checkpoints.

python -m recipe.offpolicy.lengths metrics.jsonl [DIR ...] [--png lengths.png]
python -m recipe.offpolicy.lengths val/100.jsonl val/1000.jsonl --tokenizer FOLDER [--png lengths.png]

A metrics file is written by verl's logger `file`; length_penalty=none adds the metrics by correctness. A directory is
read as a recording. With validation dumps, the checkpoint of the first dump determines which prompts are easy and which
are hard.
Exit status: 0, or 2 if an argument is invalid.
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
    shown = list_output_modules(json=options.json, png=bool(options.png), html=False)
    require_modules("lengths", "torch", "numpy", "pyarrow", "xxhash", *shown)
    from .analysis.lengths.by_length import NoClassError, read_ends
    from .analysis.lengths.curves import CurveError, build_table, draw_curves, read_curves
    from .analysis.plotting import PageError, check_target
    from .analysis.table import to_plain
    from .extensions.sessions import DumpError, is_dump
    from .recording import RecordingError

    try:
        if options.png is not None:
            check_target("--png", options.png, "lengths.png")
        if any(dumps := [is_dump(path) for path in options.sources]):
            if not all(dumps) or not options.tokenizer:
                raise CurveError("pass only validation dumps, and --tokenizer FOLDER, which counts their tokens.")
            return _follow(options)
        curves = {str(path): read_curves(path, correct_at_least=options.correct_at_least) for path in options.sources}
        if options.png is not None:
            from .analysis.plotting import save

            recordings = {str(path): read_ends(path) for path in options.sources if path.is_dir()}
            save(draw_curves(curves, recordings), options.png)
    except (CurveError, DumpError, NoClassError, PageError, RecordingError, OSError) as error:
        print(f"lengths: {error}", file=sys.stderr)  # noqa: T201
        return BAD_INPUT
    if options.json:
        print(json.dumps(to_plain(curves), indent=2))  # noqa: T201
        return 0
    from .analysis.table import open_console, print_blocks

    print_blocks(open_console(), *(build_table(found, name) for name, found in curves.items()))
    return 0


def _follow(options: argparse.Namespace) -> int:
    """Show prompt classes over the checkpoints of the dumps."""
    from .analysis.lengths.by_length import assign, build_rows, build_table, draw_classes, read_checkpoints
    from .analysis.lengths.curves import CurveError
    from .analysis.table import open_console, print_blocks
    from .extensions.setting_checks import load_tokenizer

    if (tokenizer := load_tokenizer(options.tokenizer)) is None:
        raise CurveError(f"--tokenizer {options.tokenizer}: there is no tokenizer in this folder.")
    checkpoints = read_checkpoints(options.sources, tokenizer)
    early, least = checkpoints[0], options.correct_at_least
    classes = assign(early, samples=options.samples, correct_at_least=least)
    if options.png is not None:
        from .analysis.plotting import save

        save(draw_classes(checkpoints, classes), options.png)
    rows = build_rows(checkpoints, classes, least)
    if options.json:
        print(json.dumps(rows, indent=2))  # noqa: T201
        return 0
    note = f"The pass rates at {early.label} determined the classes of the prompts: compare only later checkpoints."
    print_blocks(open_console(), build_table(rows, early.label), note, wrap=True)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog=name_program("lengths"), description="Length of answers by correctness over steps."
    )
    parser.add_argument(
        "sources", metavar="SOURCE", nargs="+", type=Path, help="metrics.jsonl, the directory of a recording, or dumps"
    )
    parser.add_argument(
        "--correct-at-least",
        type=parse_score,
        default=1.0,
        metavar="SCORE",
        help="smallest score that counts as correct (1.0)",
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="for dumps: the tokenizer that counts their tokens")
    parser.add_argument(
        "--samples",
        type=parse_count,
        default=64,
        metavar="N",
        help="for dumps: number of answers that determine a prompt's class (64)",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the curves")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(run("lengths", main))
