"""Functions shared by the command-line tools: missing packages, errors, outputs, closed pipes, numbers of processes."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .analysis.page import Sections

BAD_INPUT, CLOSED = 2, 141
"""Exit statuses for an invalid input and for a pipe that its reader closed (128 + SIGPIPE)."""
TOKENIZER = "folder of the tokenizer that converts token ids to text (default: the tokenizer of the recorded model)"
PROGRAM = "OFFPOLICY_PROGRAM"
"""Environment variable that contains the command that started a tool, such as ``offpolicy doctor``; if unset, ``python
-m`` is shown."""
_DISTRIBUTIONS = {"hydra": "hydra-core", "wandb_workspaces": "wandb-workspaces"}


class Output(NamedTuple):
    """The result of a tool.

    Attributes:
        title, subtitle: of the page; the subtitle is also that of the figure.
        sections: tables, text and panels for the console, ``--png`` and ``--html``; built only if they are needed.
        document: values for ``--json``.
        status: exit status of the tool.
    """

    title: str
    sections: Callable[[], Sections]
    document: Callable[[], Any]
    subtitle: str = ""
    status: int = 0


def run_tool(
    tool: str, options: argparse.Namespace, modules: Iterable[str], work: Callable[[argparse.Namespace], Output]
) -> int:
    """Run ``work``, write its files, and print tables or JSON; return the exit status.

    Args:
        modules: modules that the tool needs, in addition to those of its outputs.
    """
    html = getattr(options, "html", None)
    of_outputs = {"rich": not options.json, "matplotlib": options.png, "bokeh": html, "jinja2": html}
    require_modules(tool, *modules, *(module for module, needed in of_outputs.items() if needed))

    def write() -> int:
        from .analysis import page, plotting, table

        plotting.check_outputs(options, tool)
        output = work(options)
        sections = output.sections() if options.png or html or not options.json else {}
        if options.png:
            plotting.save(page.draw_figure(sections, output.subtitle), options.png)
        if html:
            page.write_page(html, output.title, sections, output.subtitle)
        if options.json:
            print(json.dumps(table.to_plain(output.document()), indent=2, allow_nan=False))  # noqa: T201
        else:
            page.print_sections(sections)
        return output.status

    return catch_errors(tool, write)


def catch_errors(tool: str, work: Callable[[], int]) -> int:
    """Run ``work`` in a prepared process and return its status; an input error prints one line and returns 2."""
    from .analysis import AnalysisError
    from .analysis.jobs import prepare_process
    from .correction import SpecError
    from .recording import RecordingError

    prepare_process()
    try:
        return work()
    except BrokenPipeError:
        raise
    except (AnalysisError, RecordingError, SpecError, OSError) as error:
        return refuse(tool, error)


def name_program(tool: str) -> str:
    """Return the command that starts a tool, for the tool's usage text."""
    return os.environ.get(PROGRAM, f"python -m recipe.offpolicy.{tool}")


def require_modules(tool: str, *modules: str) -> None:
    """Exit with status 2 and a one-line message if one of ``modules`` is not installed."""
    if missing := [module for module in modules if not _is_there(module)]:
        names = " ".join(_DISTRIBUTIONS.get(module, module) for module in missing)
        sys.stderr.write(f"{tool}: not installed: {', '.join(missing)}. Fix: pip install {names}\n")
        raise SystemExit(BAD_INPUT)


def refuse(tool: str, error: object) -> int:
    """Print why a tool failed; return its exit status."""
    sys.stderr.write(f"{tool}: {error}\n")
    return BAD_INPUT


def add_recording(parser: argparse.ArgumentParser) -> None:
    """Add the recording, and the options ``--jobs`` and ``--ray``, which ``analysis.jobs`` reads."""
    directory = "the recording: the directory named by offpolicy.record.dir"
    parser.add_argument("directory", type=Path, metavar="DIR", help=directory)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--jobs", type=parse_count, metavar="N", help="processes; default: one per core, 1 for a small recording")
    add("--ray", metavar="ADDRESS", help="run on this Ray cluster; its nodes need the package and the recording")


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Add ``--steps``."""
    steps = "steps to read: one number, or a range whose start or end may be omitted (default: all)"
    parser.add_argument("--steps", type=read_steps, metavar="FIRST:LAST", help=steps)


def add_outputs(parser: argparse.ArgumentParser, *, html: bool = False) -> None:
    """Add ``--png``, ``--json`` and, for a tool with a page, ``--html``."""
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a figure")
    if html:
        parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


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
