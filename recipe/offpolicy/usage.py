"""Answer ``--help`` before a command's imports, because these take seconds or belong to another program."""

from __future__ import annotations

import sys

FLAGS = ("--help", "-h")


def answer_help(usage: str | None) -> None:
    """Print the usage and exit with 0 if the command line asks for help."""
    if any(flag in sys.argv[1:] for flag in FLAGS):
        print((usage or "").strip())  # noqa: T201
        sys.exit(0)
