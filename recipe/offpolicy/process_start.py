"""Settings by which a process of this package starts fast: one that trains, and one that checks a launch and ends."""

from __future__ import annotations

import gc

from verl_patches import compiler_imports, lazy_imports

CHECK_FLAG = "--check"
"""The argument by which a launch is checked and not made."""


def hasten_start() -> None:
    """Collect no garbage in this process until ``end_start``, and parse YAML in C; before verl is imported."""
    import yaml

    # What is imported stays until the end, and collecting garbage among it takes a quarter of the time.
    gc.disable()
    # OmegaConf derives its loader from this class each time that it reads a file.
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def hasten_check() -> None:
    """Do the same, and have this process import verl lazily and compile nothing: half of the time of a check.

    Not for a process that trains: it needs what verl imports, and PyTorch's compiler.
    """
    hasten_start()
    compiler_imports.leave_out()
    lazy_imports.install()


def end_start() -> None:
    """Collect garbage again, and never among what has been imported."""
    gc.freeze()
    gc.enable()
