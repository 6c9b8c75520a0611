"""Show answer lengths by correctness over the steps of runs or recordings, and by class over checkpoints.

python -m recipe.offpolicy.lengths metrics.jsonl [DIR ...] [--png lengths.png]
python -m recipe.offpolicy.lengths val/100.jsonl val/1000.jsonl --tokenizer FOLDER [--png lengths.png]

A metrics file is written by verl's logger `file`; length_penalty=none adds the metrics by correctness to it. A
directory is read as a recording. With validation dumps, the checkpoint of the first dump determines which prompts are
easy and which are hard. Exit status: 0, or 2 if an argument is invalid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .command_line import Output, add_outputs, name_program, parse_count, parse_score, run, run_tool

if TYPE_CHECKING:
    from .analysis.page import Sections


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    modules = ("torch", "numpy", "pyarrow", "xxhash")
    return run_tool("lengths", build_parser().parse_args(arguments), modules, _read)


def _read(options: argparse.Namespace) -> Output:
    from .analysis import AnalysisError
    from .extensions.validation_answers import DumpError, is_dump

    try:
        if not any(dumps := [is_dump(path) for path in options.sources]):
            return _read_curves(options)
        if not all(dumps) or not options.tokenizer:
            raise AnalysisError("pass only validation dumps, and --tokenizer FOLDER, which counts their tokens.")
        return _read_classes(options)
    except DumpError as error:
        raise AnalysisError(str(error)) from error


def _read_curves(options: argparse.Namespace) -> Output:
    """Read lengths by correctness over steps."""
    from .analysis.lengths import build_table, plot_curves, read_curves, read_ends

    curves = {str(path): read_curves(path, correct_at_least=options.correct_at_least) for path in options.sources}
    tables = [build_table(found, name) for name, found in curves.items()]

    def build() -> Sections:
        ends = {str(path): read_ends(path) for path in options.sources if path.is_dir()} if options.png else {}
        return {"Lengths": [*tables, plot_curves(curves, ends)]}

    return Output("Length of answers", build, lambda: curves)


def _read_classes(options: argparse.Namespace) -> Output:
    """Read prompt classes over the checkpoints of dumps."""
    from .analysis import AnalysisError, lengths
    from .extensions.setting_checks import load_tokenizer

    if (tokenizer := load_tokenizer(options.tokenizer)) is None:
        raise AnalysisError(f"--tokenizer {options.tokenizer}: there is no tokenizer in this folder.")
    checkpoints = lengths.read_checkpoints(options.sources, tokenizer)
    early, least = checkpoints[0], options.correct_at_least
    classes = lengths.assign(early, samples=options.samples, correct_at_least=least)
    rows = lengths.build_class_rows(checkpoints, classes, least)
    note = f"The pass rates at {early.label} determined the classes of the prompts: compare only later checkpoints."
    table, panels = lengths.build_class_table(rows, early.label), lengths.plot_classes(checkpoints, classes)
    return Output("Length of answers", lambda: {"Lengths": [table, note, panels]}, lambda: rows)


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
    add_outputs(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
