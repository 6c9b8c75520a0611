"""The answer to ``--help`` of commands whose own imports take seconds, or whose arguments are another program's."""

from __future__ import annotations

import sys

FLAGS = ("--help", "-h")


def answer_help(usage: str | None) -> None:
    """Print the usage and end the program with 0, if that is what the command line asks for."""
    if any(flag in sys.argv[1:] for flag in FLAGS):
        print((usage or "").strip())  # noqa: T201
        sys.exit(0)
