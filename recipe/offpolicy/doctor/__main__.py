"""Entry point of ``python -m recipe.offpolicy.doctor``; see the package's docstring."""

import sys

from .foreign_code import set_paths_aside

# The folder of an unknown script may contain modules with the same names as known modules.
if any(argument.partition("=")[0] == "--script" for argument in sys.argv):
    set_paths_aside()

import contextlib
import logging
import os

# verl and its imports log about GPUs and plugins, which do not matter here.
logging.disable(logging.WARNING)

from ..command_line import run  # noqa: E402
from .doctor_command import describe_failure, main  # noqa: E402

try:
    from ..process_start import hasten_check

    hasten_check()
    status = run(main)
except SystemExit as stop:  # --help, and invalid combinations of arguments
    status = stop.code if isinstance(stop.code, int) else 2
except Exception as error:  # even the doctor's own modules could not be imported
    sys.stderr.write(f"{describe_failure(error)}\n")
    status = 2
for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(BrokenPipeError):
        stream.flush()
# Shutting down the interpreter would take another second.
os._exit(status)
