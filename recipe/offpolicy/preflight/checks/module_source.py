"""Location of a module's source without importing it: importing verl alone takes seconds."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def find_source(module: str) -> Path | None:
    """Find the file of a module by its dotted name, as ``python -m`` would; None if there is none."""
    top, *below = module.split(".")
    try:
        # The launch's own directory comes first, and is not on the path of every process that checks it.
        spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path]) or importlib.util.find_spec(top)
    except (ValueError, ImportError):
        return None
    if spec is None:
        return None
    if not below and spec.submodule_search_locations is None:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *below)
        for candidate in (path.with_suffix(".py") if below else path / "__main__.py", path / "__main__.py"):
            if candidate.is_file():
                return candidate
        if (path / "__init__.py").is_file():
            return path / "__init__.py"
    return None
