"""All tools under one name: ``offpolicy COMMAND ...``, or ``python -m recipe.offpolicy COMMAND ...``.

``offpolicy COMMAND`` runs ``python -m recipe.offpolicy.COMMAND``. With argcomplete installed,
``eval "$(register-python-argcomplete offpolicy)"`` completes commands and options in bash and zsh.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
from typing import Final

from .command_line import PROGRAM
from .version import VERSION

COMMANDS: Final = {
    "doctor": ("doctor", "doctor.doctor_command", "check a launch: which corrections would be live, with fixes"),
    "whatif": ("whatif", "whatif", "replay other corrections over a recording"),
    "calibrate": ("calibrate", "calibrate", "propose bounds from a recording"),
    "attribute": ("attribute", "attribute", "attribute the mismatch of a recording to its causes"),
    "report": ("report", "report", "write one HTML page about a recording"),
    "panels": ("panels", "panels", "add the panels of a run to TensorBoard or Weights & Biases"),
    "translate": ("translate", "translate.__main__", "translate a correction between frameworks"),
    "pass-at-k": ("pass_at_k", "pass_at_k", "estimate pass@k from validation dumps"),
    "lengths": ("lengths", "lengths", "show the length of answers by correctness"),
    "rft": ("rft", "rft", "make SFT data from a student's correct answers, in the teacher's format"),
}
"""Command -> the module that runs it, the module that builds its parser, and what the command does."""


def main() -> None:
    """Run the command that the first argument names, and end the process with the command's exit status."""
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    parser = argparse.ArgumentParser(
        prog="offpolicy",
        description="Tools for off-policy corrections in verl; also: python -m recipe.offpolicy COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"verl-offpolicy {VERSION}")
    names = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, _, summary) in COMMANDS.items():
        names.add_parser(name, help=summary, add_help=False)
    chosen = parser.parse_args(sys.argv[1:2]).command
    os.environ[PROGRAM] = f"offpolicy {chosen}"
    del sys.argv[1]
    runpy.run_module(f"{__package__}.{COMMANDS[chosen][0]}", run_name="__main__", alter_sys=True)


def _complete() -> None:
    """Answer the shell's request for completions, and exit."""
    import argcomplete

    parser = argparse.ArgumentParser(prog="offpolicy")
    names = parser.add_subparsers()
    for name, (_, module, _) in COMMANDS.items():
        builder = importlib.import_module(f"{__package__}.{module}").build_parser
        names.add_parser(name, parents=[builder()], add_help=False)
    argcomplete.autocomplete(parser)


if __name__ == "__main__":
    main()
