"""Runs a program under a hard time limit, ends all that it started and reports what it left behind.

    python supervise.py LIMIT_SECONDS REPORT.json COMMAND...
    python supervise.py --after TEXT OUTPUT LIMIT_SECONDS REPORT.json COMMAND...

The limit counts from the start, or from the time when the file OUTPUT holds TEXT.

A process of its own, because it adopts the orphans of the run (Ray's daemons leave their parents and their
process group), and because it cleans up also when the test that started it is interrupted.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.quickstart.processes import SharedMemoryWatch, become_subreaper, end_descendants, find_descendants

TICK = 0.5
CLEAN_UP = 120.0
"""Seconds that an interrupted program has for its cleanup."""
PATIENCE = 30.0
"""Seconds within which its daemons must notice its end."""
LONGEST_WAIT = 900.0
"""Seconds within which the text must have been printed."""


class Stop(BaseException):
    """The supervisor itself was asked to end."""


def main(limit: float, report: Path, command: list[str], begun: Callable[[], bool] = lambda: True) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Stop

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    become_subreaper()
    watch, timed_out = SharedMemoryWatch(), False
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def until_it_ends(seconds: float, enough: Callable[[], bool] = lambda: False) -> bool:
        deadline = time.monotonic() + seconds
        while program.poll() is None and time.monotonic() < deadline and not enough():
            watch.observe()
            time.sleep(TICK)
        return program.poll() is not None

    lingering: list[str] = []
    try:
        until_it_ends(LONGEST_WAIT, enough=begun)
        if not until_it_ends(limit):
            timed_out = True
            program.send_signal(signal.SIGINT)  # as a user would; the program must clean up behind itself
            until_it_ends(CLEAN_UP)
        deadline = time.monotonic() + PATIENCE
        while (alive := find_descendants()) and time.monotonic() < deadline:
            time.sleep(TICK)
        lingering = [f"{process.pid} {process.name()}" for process in alive]
    except Stop:
        timed_out = True
    finally:
        watch.observe()
        # Zombies are collected by end_descendants too, the program's status must be taken before.
        returncode = program.poll()
        survivors = end_descendants()
        leaked = watch.remove_leaked()
        result = {
            "returncode": -signal.SIGKILL if returncode is None else returncode,
            "timed_out": timed_out,
            "lingering": [*lingering, *map(str, survivors)],
            "leaked": leaked,
        }
        report.write_text(json.dumps(result))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    condition = {}
    if arguments[0] == "--after":
        text, printed = arguments[1], Path(arguments[2])
        condition = {"begun": lambda: text in printed.read_text(errors="replace")}
        arguments = arguments[3:]
    main(float(arguments[0]), Path(arguments[1]), arguments[2:], **condition)
