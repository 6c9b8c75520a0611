"""See the package."""

import gc
import logging
import os
import sys

# What verl imports stays until the end: looking for garbage among it takes a quarter of the time.
gc.disable()
# verl and what it imports talk of GPUs and plugins, which do not matter here.
logging.disable(logging.WARNING)

from .command import main  # noqa: E402

status = main()
sys.stdout.flush()
sys.stderr.flush()
# Taking it all down would take another second.
os._exit(status)
