"""See the package."""

import gc
import os
import sys

# What verl imports stays until the end: looking for garbage among it takes a quarter of the time.
gc.disable()

from .command import main  # noqa: E402

status = main()
sys.stdout.flush()
sys.stderr.flush()
# Taking it all down would take another second.
os._exit(status)
