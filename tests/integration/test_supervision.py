"""The supervision of the integration tests: it finds and ends hidden processes, and leaves other processes alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Runner = Callable[..., Any]
HANGS = 300.0
"""Seconds within which a process that ends without help has ended."""

# A grandchild in a session of its own whose parent ends at once: what a Ray daemon looks like.
HIDE = (
    "import subprocess, sys\n"
    "code = \"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    ' start_new_session=True); print(p.pid, flush=True)"\n'
    "subprocess.run([sys.executable, '-c', code], check=True)\n"
)
LEAK = (
    "import time\n"
    "from multiprocessing import resource_tracker, shared_memory\n"
    "segment = shared_memory.SharedMemory(create=True, size=64)\n"
    "resource_tracker.unregister(segment._name, 'shared_memory')\n"
    "print('made', segment.name, flush=True)\n"
    "time.sleep(600)\n"
)


def test_a_hidden_process_is_found_and_ended(run_program: Runner) -> None:
    done = run_program([sys.executable, "-c", HIDE], limit=HANGS, may_leave=True)
    hidden = int(done.output)
    assert [entry.split()[0] for entry in done.lingering] == [str(hidden)]
    assert not Path(f"/proc/{hidden}").exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_leaked_shared_memory_is_found_and_removed(run_program: Runner) -> None:
    done = run_program([sys.executable, "-c", LEAK], limit=2, after="made", may_leave=True)
    assert done.leaked == [done.output.split()[1]]
    assert not Path("/dev/shm", done.leaked[0]).exists()
