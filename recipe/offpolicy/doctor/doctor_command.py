"""The command line of the doctor."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..fault_tolerance.redaction import redact_streams
from ..preflight.python_source import OURS
from . import __doc__ as _HELP
from .foreign_code import ForeignCode

if TYPE_CHECKING:
    from .program import Launch
    from .show import Diagnosis


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = build_parser()
    known, given = parser.parse_known_args(arguments)
    given = [argument for argument in given if argument != "--"]
    if known.script is not None and known.module is not None:
        parser.error("--script and --module cannot be combined: the script determines the program. Remove --module")
    if known.line is not None and known.script is None:
        parser.error("--line requires --script. Add --script FILE")
    redact_streams()
    out = sys.stdout
    # Imported packages may print, but standard output is reserved for the result, which may be JSON.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from .show import show, to_json

        with contextlib.nullcontext() if known.script is None else ForeignCode(known.script):
            diagnoses = _diagnose(known, given, None if known.json else out)
    worst = max(diagnoses, key=lambda each: each.status)
    # A reader such as `head` may close the pipe early, which rich turns into SystemExit.
    with contextlib.suppress(BrokenPipeError, SystemExit):
        if known.json:
            plain = [to_json(each) for each in diagnoses]
            chosen = plain[diagnoses.index(worst)]
            json.dump(chosen | ({"launches": plain} if len(plain) > 1 else {}), out, indent=2)
            out.write("\n")
        else:
            for number, diagnosis in enumerate(diagnoses, 1):
                if len(diagnoses) > 1:
                    out.write(f"launch {number} of {len(diagnoses)}\n")
                show(diagnosis, out)
        out.flush()
    return worst.status


def _diagnose(known: argparse.Namespace, given: Sequence[str], out: IO[str] | None) -> list[Diagnosis]:
    """Diagnose the launch; for a script, diagnose each launch in a loop or function call.

    Problems visible in a script's text are shown first, because judging a launch imports torch and verl, which takes
    seconds.

    Args:
        out: where to print immediately which arguments a script does not pass on; None for JSON.
    """
    from verl_patches.contract import PatchError

    from .bash.shell_values import ScriptError
    from .program import Launch, LaunchError, find_program
    from .scripts import find_launches
    from .show import Diagnosis, show_lost

    launch = Launch("" if known.script else known.module or OURS, tuple(given), known.script or "")
    try:
        launches = find_launches(Path(known.script), list(given), known.line) if known.script else [launch]
        for launch in launches:
            if out is not None:
                show_lost(launch, out)
            if not launch.ours:
                find_program(launch.module)
        return _judge(launches)
    except (PatchError, LaunchError, ScriptError) as error:
        return [Diagnosis(launch, error=str(error))]
    except Exception as error:  # an error in the doctor: Python's exit status 1 would mean NO-OP
        return [Diagnosis(launch, error=describe_failure(error))]


def _judge(launches: Sequence[Launch]) -> list[Diagnosis]:
    from ..extensions.add_on import own_launch
    from .diagnosis import diagnose

    token = own_launch.set(not launches[0].origin)
    try:
        return list(map(diagnose, launches))
    finally:
        own_launch.reset(token)


def describe_failure(error: Exception) -> str:
    """Format the message for an internal error of the doctor."""
    said = " ".join(str(error).split())
    return f"Internal error in the doctor; your launch was not checked: {type(error).__name__}: {said}."


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's own arguments; unknown arguments are passed to Hydra."""
    parser = argparse.ArgumentParser(
        prog=os.environ.get("OFFPOLICY_PROGRAM", "python -m recipe.offpolicy.doctor"),
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--json] [--module MODULE | --script FILE [--line N]] [Hydra's flags and overrides]",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on standard output")
    parser.add_argument("--script", metavar="FILE", help="launch script to check; other arguments are passed to it")
    parser.add_argument("--line", type=int, metavar="N", help="line of the launch to check, if the script has several")
    parser.add_argument("--module", metavar="MODULE", help=f"module of the launched program (default: {OURS})")
    return parser
