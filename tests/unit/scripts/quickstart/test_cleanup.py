"""Nothing that a run started may remain: processes, daemons, shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from scripts.quickstart.processes import SharedMemoryWatch, read_used_files
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def in_a_supervisor(body: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, because it ends all of its descendants."""
    code = "from scripts.quickstart.processes import *\nimport os, subprocess, time\n" + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_whole_tree_ends_with_its_daemons():
    done = in_a_supervisor(
        """
        become_subreaper()
        # A child, a grandchild that ignores SIGTERM, and a daemon in a session of its own whose parent has ended.
        script = "(setsid sleep 598 &) ; trap '' TERM; sleep 597 & wait"
        child = subprocess.Popen(["bash", "-c", script], start_new_session=True)
        deadline = time.monotonic() + 300
        while len(found := find_descendants()) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(found) == 3, found
        assert end_descendants(patience=0.3, limit=300) == []
        print(*[p.pid for p in found if p.is_running() and p.status() != "zombie"])
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_only_the_runs_own_segments_are_removed(tmp_path):
    (tmp_path / "older").write_bytes(b"0" * 4096)
    watch = SharedMemoryWatch(tmp_path)
    (tmp_path / "foreign").write_bytes(b"0" * 4096)
    # A semaphore keeps another name than the one it was mapped under: "draft" is linked to "leaked" and unlinked.
    code = f"""
import mmap, os
file = open({str(tmp_path / "draft")!r}, "wb+"); file.write(b"0" * 4096); file.flush()
kept = mmap.mmap(file.fileno(), 4096); file.close()
os.link({str(tmp_path / "draft")!r}, {str(tmp_path / "leaked")!r}); os.unlink({str(tmp_path / "draft")!r})
print("ready", flush=True); input()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        status = (tmp_path / "leaked").stat()
        assert (status.st_dev, status.st_ino) in read_used_files(child.pid, tmp_path)
        watch.observe()
        assert watch.remove_leaked() == []  # it is still in use
    finally:
        child.kill()
        child.communicate()
    assert watch.remove_leaked() == ["leaked"]
    assert sorted(os.listdir(tmp_path)) == ["foreign", "older"]
