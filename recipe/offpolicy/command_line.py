"""Functions shared by the command-line tools: missing packages, closed pipes, numbers of processes."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec

BAD_INPUT, CLOSED = 2, 141
"""Exit statuses for a missing package and for a pipe that its reader closed (128 + SIGPIPE)."""
TOKENIZER = "folder of the tokenizer that converts token ids to text (default: the tokenizer of the recorded model)"
PROGRAM = "OFFPOLICY_PROGRAM"
"""Environment variable that contains the command that started a tool, such as ``offpolicy doctor``; if unset, ``python
-m`` is shown."""
_DISTRIBUTIONS = {"hydra": "hydra-core", "wandb_workspaces": "wandb-workspaces"}


def name_program(tool: str) -> str:
    """Return the command that starts a tool, for the tool's usage text."""
    return os.environ.get(PROGRAM, f"python -m recipe.offpolicy.{tool}")


def require_modules(tool: str, *modules: str) -> None:
    """Exit with status 2 and a one-line message if one of ``modules`` is not installed."""
    if missing := [module for module in modules if not _is_there(module)]:
        names = " ".join(_DISTRIBUTIONS.get(module, module) for module in missing)
        sys.stderr.write(f"{tool}: not installed: {', '.join(missing)}. Fix: pip install {names}\n")
        raise SystemExit(BAD_INPUT)


def list_output_modules(options: argparse.Namespace) -> list[str]:
    """List the modules that the outputs ``--json``, ``--png`` and ``--html`` need."""
    needed = {"png": ["matplotlib"], "html": ["bokeh", "jinja2"]}
    files = [module for name, modules in needed.items() if getattr(options, name, None) for module in modules]
    return files if options.json else ["rich", *files]


def refuse(tool: str, error: object) -> int:
    """Print why a tool failed; return its exit status."""
    sys.stderr.write(f"{tool}: {error}\n")
    return BAD_INPUT


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Add ``--jobs`` and ``--ray``, which ``analysis.jobs`` reads."""
    add = parser.add_mutually_exclusive_group().add_argument
    add("--jobs", type=parse_count, metavar="N", help="processes; default: one per core, 1 for a small recording")
    add("--ray", metavar="ADDRESS", help="run on this Ray cluster; its nodes need the package and the recording")


def read_steps(text: str) -> tuple[int, int | None]:
    """Parse ``FIRST:LAST`` into the first and the last step; None as the last step means no limit."""
    found = re.fullmatch(r"([0-9]{0,18})(:?)([0-9]{0,18})", text.strip())
    if found is None or not (found[1] or found[3]):
        raise argparse.ArgumentTypeError(f"{text!r} is neither FIRST:LAST, such as 3:10, 3: or :10, nor one number")
    first = int(found[1] or 0)
    last = int(found[3]) if found[3] else None if found[2] else first
    if last is not None and last < first:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins; put the smaller number first, such as 3:10")
    return first, last


def parse_count(text: str, least: int = 1) -> int:
    """Parse a whole number of at least ``least``."""
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 19 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count of {least} or more, such as 8")
    return int(text)


def parse_score(text: str) -> float:
    """Parse a finite number; NaN is rejected, because with NaN as threshold no answer would count as correct."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number, such as 1.0")
    return found


def run(main: Callable[[], int]) -> int:
    """Run the ``main`` of a tool and return its exit status; a closed pipe does not cause a traceback.

    The output of ``main`` is redacted.
    """
    try:
        with suppress(ModuleNotFoundError):  # main reports all missing packages at once
            from .fault_tolerance.redaction import redact_streams

            redact_streams()
        try:
            return main()
        finally:  # also after --help, which ends the program
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output at exit, which would fail again on the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False
