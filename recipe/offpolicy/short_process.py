"""Settings of a process that checks a launch and ends, so that it starts in half of the time."""

from __future__ import annotations

import gc

from verl_patches import compiler_imports, lazy_imports

CHECK_FLAG = "--check"
"""The argument by which a launch is checked and not made."""


def shorten_start() -> None:
    """Make this process import verl lazily, compile nothing, and parse YAML in C; before verl is imported.

    Not for a process that trains: it needs what verl imports, and PyTorch's compiler.
    """
    import yaml

    # What is imported stays until the end, and collecting garbage among it takes a quarter of the time.
    gc.disable()
    compiler_imports.leave_out()
    lazy_imports.install()
    # OmegaConf derives its loader from this class each time that it reads a file.
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
