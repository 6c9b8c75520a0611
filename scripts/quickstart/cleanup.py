"""Ends everything that a run started and removes what it left in shared memory. Nothing is found by its name."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

MARKER = "QUICKSTART_RUN_ID"
SHM = Path("/dev/shm")

Identity = tuple[int, int]
"""Device and inode of a file."""

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Makes orphaned descendants this process's children, so that `setsid` cannot hide them (Linux).

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def processes_of_run(run_id: str) -> list[psutil.Process]:
    """This process's descendants, and whatever carries the run's marker in its environment; never this process."""
    found = {process.pid: process for process in psutil.Process().children(recursive=True)}
    entry = f"{MARKER}={run_id}".encode()
    for process in psutil.process_iter():
        if process.pid in found or process.pid == os.getpid():
            continue
        try:
            # Not psutil's environ(): programs that rename themselves leave text there that does not parse.
            if entry in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found[process.pid] = process
        except OSError:
            continue
    return [process for process in found.values() if _alive(process)]


def end_processes(run_id: str, patience: float = 5.0, limit: float = 20.0) -> list[int]:
    """Asks the run's processes to end, then kills them; gives the pids that survive, normally none.

    Args:
        patience: seconds between SIGTERM and SIGKILL, for those who unlink what they own on their way out.
        limit: seconds after which the survivors are given up.
    """
    start = time.monotonic()
    asked: set[int] = set()
    while remaining := processes_of_run(run_id):
        elapsed = time.monotonic() - start
        if elapsed > limit:
            return [process.pid for process in remaining]
        for process in remaining:
            # Daemons may start others while they end, so each round looks again.
            if elapsed > patience:
                _send(process, signal.SIGKILL)
            elif process.pid not in asked:
                asked.add(process.pid)
                _send(process, signal.SIGTERM)
        _reap()
        time.sleep(0.1)
    _reap()
    return []


class SharedMemoryWatch:
    """Remembers which segments in /dev/shm were seen in use by the run's own processes, and only those.

    Segments are told apart by device and inode: a semaphore is mapped under another name than the one it keeps.
    """

    def __init__(self, folder: Path = SHM) -> None:
        self._folder = folder
        self._known = set(self._listing())
        self._ours: set[Identity] = set()

    def observe(self, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        """Looks who uses the segments that appeared; to be called often, so it asks for processes only then."""
        if new := set(self._listing()) - self._known:
            for process in processes():
                self._ours |= new & used_files(process.pid, self._folder)
            self._known |= self._ours

    def remove_leaked(self) -> list[str]:
        """Removes the run's segments that no process uses any more; gives their names."""
        left = {identity: name for identity, name in self._listing().items() if identity in self._ours}
        if left:
            for process in psutil.process_iter():
                for identity in used_files(process.pid, self._folder):
                    left.pop(identity, None)
        for name in left.values():
            (self._folder / name).unlink(missing_ok=True)
        return sorted(left.values())

    def _listing(self) -> dict[Identity, str]:
        entries = {}
        with contextlib.suppress(OSError), os.scandir(self._folder) as found:
            for entry in found:
                with contextlib.suppress(OSError):  # it is gone
                    status = entry.stat(follow_symlinks=False)
                    entries[(status.st_dev, status.st_ino)] = entry.name
        return entries


def used_files(pid: int, folder: Path = SHM) -> set[Identity]:
    """Device and inode of what a process has mapped or open below `folder`; empty if it cannot be looked into."""
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


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)  # checks that the pid still is the process that was found


def _reap() -> None:
    """Collects the adopted children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
