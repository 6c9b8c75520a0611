"""Starts this package's programs: answers ``--help`` before slow imports, and makes the imports fast."""

from __future__ import annotations

import gc
import sys

from verl_patches import lazy_imports

CHECK_FLAG = "--check"
"""The argument that requests a check of a launch without starting it."""


def hasten_start() -> None:
    """Disable garbage collection until ``end_start``, and parse YAML in C; call it before verl is imported."""
    import yaml

    # Imported objects are never freed, and scanning them for garbage takes a quarter of the time.
    gc.disable()
    # OmegaConf derives its loader from this class whenever it reads a file.
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def hasten_check() -> None:
    """In addition to ``hasten_start``, import verl lazily and compile nothing; this halves the time of a check.

    A training process must not call this, because it needs verl's imports and PyTorch's compiler.
    """
    hasten_start()
    lazy_imports.install()


def end_start() -> None:
    """Enable garbage collection again, but exclude objects that have been imported."""
    gc.freeze()
    gc.enable()


def answer_help(usage: str | None) -> None:
    """Print the usage and exit with 0 if the command line asks for help; call it before other imports."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print((usage or "").strip())  # noqa: T201
        sys.exit(0)
