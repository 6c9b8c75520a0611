"""Parent of one command of a supervisor: ends the command and all that it started when the supervisor dies.

A supervisor that is killed (SIGKILL) cannot clean up; the kernel then signals this process.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from types import FrameType
from typing import NoReturn

from .cleanup import SharedMemoryWatch, become_subreaper, die_with_parent, end_descendants


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def run() -> NoReturn:
    """Run the command of this process's arguments: the supervisor's pid, then the command and its arguments."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    become_subreaper()
    segments = SharedMemoryWatch()
    try:
        die_with_parent(int(sys.argv[1]))
        status = subprocess.Popen(sys.argv[2:]).wait()
    except SystemExit:
        segments.observe()
        end_descendants()
        segments.remove_leaked()
        raise
    sys.exit(status if status >= 0 else 128 - status)
