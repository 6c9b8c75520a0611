"""Common ends of the command-line tools: missing packages and readers that close the pipe early."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec

BAD_INPUT, CLOSED = 2, 141
"""Exit status: a package is missing; the reader closed the pipe (128 + SIGPIPE)."""
_DISTRIBUTIONS = {"hydra": "hydra-core"}
_OURS = ("hydra", "jinja2", "matplotlib", "numpy", "omegaconf", "pyarrow", "rich", "torch")


def require_modules(tool: str, *modules: str) -> None:
    """Exit with status 2 and a one-line message if one of ``modules`` is not installed."""
    if missing := [module for module in modules if not _is_there(module)]:
        names = " ".join(_DISTRIBUTIONS.get(module, module) for module in missing)
        sys.stderr.write(f"{tool}: not installed: {', '.join(missing)}. Fix: pip install {names}\n")
        raise SystemExit(BAD_INPUT)


def list_output_modules(*, json: bool, png: bool, html: bool) -> list[str]:
    """List the modules that a tool's output needs."""
    return [*([] if json else ["rich"]), *(["matplotlib"] if png or html else []), *(["jinja2"] if html else [])]


def run(tool: str, main: Callable[[], int]) -> int:
    """Run ``main`` and return its exit status; no traceback where the reader leaves (``

    head``) or a package is missing.
    """
    try:
        try:
            return main()
        finally:  # also behind --help, which ends the program
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output at exit, and would fail again on the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except ModuleNotFoundError as error:
        # Only packages that this project requires get the hint; another missing module is a bug.
        name = (error.name or "").split(".")[0]
        if name not in _OURS:
            raise
        require_modules(tool, name)
        raise


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False
