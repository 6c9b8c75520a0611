"""Clean-up of a run's processes and shared memory, found by descent and never by name."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
Identity = tuple[int, int]
"""Device and inode of a file."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def become_subreaper() -> None:
    """Make orphaned descendants this process's children, so that `setsid` cannot hide them (Linux)."""
    _control(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when its parent dies; sends it at once if it is dead (Linux)."""
    _control(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _control(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def find_descendants() -> list[psutil.Process]:
    """Find this process's living descendants; a subreaper's include those whose own parents have ended."""
    return [process for process in psutil.Process().children(recursive=True) if _is_alive(process)]


def end_descendants(patience: float = 5.0, limit: float = 20.0) -> list[int]:
    """Ask all descendants to end, then kill them.

    Args:
        patience: seconds between SIGTERM and SIGKILL, for those who unlink what they own on their way out.
        limit: seconds after which the survivors are given up.

    Returns:
        The pids that survive, normally none.
    """
    start = time.monotonic()
    asked: set[int] = set()
    # Daemons may start others while they end, so each round looks again.
    while remaining := find_descendants():
        elapsed = time.monotonic() - start
        if elapsed > limit:
            break
        for process in remaining:
            with contextlib.suppress(psutil.Error):  # psutil checks that the pid still is this process
                if elapsed > patience:
                    process.kill()
                elif process.pid not in asked:
                    asked.add(process.pid)
                    process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    return [process.pid for process in remaining]


class SharedMemoryWatch:
    """The segments in /dev/shm that were seen in use by this process's descendants, and only those.

    Segments are told apart by device and inode: a semaphore is mapped under another name than the one it keeps.
    """

    def __init__(self, folder: Path = SHM) -> None:
        self._folder = folder
        self._known = set(self._list())
        self._ours: set[Identity] = set()

    def observe(self) -> None:
        """Find the users of the segments that appeared; to be called often."""
        if new := set(self._list()) - self._known:
            for process in find_descendants():
                self._ours |= new & read_used_files(process.pid, self._folder)
            self._known |= self._ours

    def remove_leaked(self) -> list[str]:
        """Remove the run's segments that no process uses any more, and return their names."""
        left = {identity: name for identity, name in self._list().items() if identity in self._ours}
        for pid in psutil.pids() if left else ():
            for identity in read_used_files(pid, self._folder):
                left.pop(identity, None)
        for name in left.values():
            (self._folder / name).unlink(missing_ok=True)
        return sorted(left.values())

    def _list(self) -> dict[Identity, str]:
        entries = {}
        with contextlib.suppress(OSError), os.scandir(self._folder) as found:
            for entry in found:
                with contextlib.suppress(OSError):  # it is gone
                    status = entry.stat(follow_symlinks=False)
                    entries[(status.st_dev, status.st_ino)] = entry.name
        return entries


def read_used_files(pid: int, folder: Path = SHM) -> set[Identity]:
    """Read device and inode of what a process has mapped or open below `folder`; empty if it cannot be inspected."""
    identities: set[Identity] = set()
    prefix = f"{folder}/"
    with contextlib.suppress(OSError):  # the process has ended, or is not ours to look into
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            # address, permissions, offset, device as major:minor in hex, inode, path
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(prefix):
                major, minor = (int(part, 16) for part in fields[3].split(":"))
                identities.add((os.makedev(major, minor), int(fields[4])))
        with os.scandir(f"/proc/{pid}/fd") as descriptors:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor.path).startswith(prefix):
                        status = os.stat(descriptor.path)
                        identities.add((status.st_dev, status.st_ino))
    return identities


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
