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
from typing import Any

from .command_line import list_output_modules, name_program, parse_count, parse_score, refuse, require_modules, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser().parse_args(arguments)
    require_modules("lengths", "torch", "numpy", "pyarrow", "xxhash", *list_output_modules(options))
    from .analysis.lengths import CurveError, NoClassError
    from .analysis.plotting import PageError, check_outputs
    from .extensions.validation_answers import DumpError, is_dump
    from .recording import RecordingError

    try:
        check_outputs(options, "lengths")
        if any(dumps := [is_dump(path) for path in options.sources]):
            if not all(dumps) or not options.tokenizer:
                raise CurveError("pass only validation dumps, and --tokenizer FOLDER, which counts their tokens.")
            document, blocks = _read_classes(options)
        else:
            document, blocks = _read_curves(options)
    except (CurveError, DumpError, NoClassError, PageError, RecordingError, OSError) as error:
        return refuse("lengths", error)
    if options.json:
        print(json.dumps(document, indent=2))  # noqa: T201
    else:
        from .analysis.table import open_console, print_blocks

        print_blocks(open_console(), *blocks, wrap=True)
    return 0


def _read_curves(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """Read and draw lengths by correctness over steps; return them for JSON and as tables."""
    from .analysis.lengths import build_table, draw_curves, read_curves, read_ends
    from .analysis.plotting import save
    from .analysis.table import to_plain

    curves = {str(path): read_curves(path, correct_at_least=options.correct_at_least) for path in options.sources}
    if options.png is not None:
        ends = {str(path): read_ends(path) for path in options.sources if path.is_dir()}
        save(draw_curves(curves, ends), options.png)
    return to_plain(curves), [build_table(found, name) for name, found in curves.items()]


def _read_classes(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """Read and draw prompt classes over the checkpoints of dumps; return them for JSON, and as a table with a note."""
    from .analysis import lengths
    from .analysis.plotting import save
    from .extensions.setting_checks import load_tokenizer

    if (tokenizer := load_tokenizer(options.tokenizer)) is None:
        raise lengths.CurveError(f"--tokenizer {options.tokenizer}: there is no tokenizer in this folder.")
    checkpoints = lengths.read_checkpoints(options.sources, tokenizer)
    early, least = checkpoints[0], options.correct_at_least
    classes = lengths.assign(early, samples=options.samples, correct_at_least=least)
    if options.png is not None:
        save(lengths.draw_classes(checkpoints, classes), options.png)
    rows = lengths.build_class_rows(checkpoints, classes, least)
    note = f"The pass rates at {early.label} determined the classes of the prompts: compare only later checkpoints."
    return rows, [lengths.build_class_table(rows, early.label), note]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog=name_program("lengths"), description="Length of answers by correctness over steps."
    )
    add = parser.add_argument
    sources = "metrics.jsonl, the directory of a recording, or dumps"
    add("sources", metavar="SOURCE", nargs="+", type=Path, help=sources)
    score = "smallest score that counts as correct (1.0)"
    add("--correct-at-least", type=parse_score, default=1.0, metavar="SCORE", help=score)
    add("--tokenizer", metavar="FOLDER", help="for dumps: the tokenizer that counts their tokens")
    samples = "for dumps: number of answers that determine a prompt's class (64)"
    add("--samples", type=parse_count, default=64, metavar="N", help=samples)
    add("--png", type=Path, metavar="FILE", help="write the curves")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
