"""Processes of a run: they are started with a log, followed, and ended together with all of their descendants."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

SHM = Path("/dev/shm")
Identity = tuple[int, int]
"""Device and inode of a file."""
TICK = 0.25
"""Seconds between checks of a child."""
SERVER = Path(__file__).resolve().parents[1] / "teacher.sh"
SERVES_WITHIN = 300.0
"""Seconds within which a teacher must start to serve; on two idle cores, this takes about 40 s."""
LENGTH = 128
"""Longest sequence of a teacher; prompt and response have 74 tokens together, and one more is decoded."""

_ROOT = Path(__file__).resolve().parents[2]
_GUARD = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from scripts.quickstart import processes; processes.guard()"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class StageFailed(RuntimeError):
    """The child ended with a nonzero status; the log shows why."""


class Tail:
    """Reads a growing file in steps, in whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[str]:
        """Read the lines that have been completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole + newline)
        return whole.decode(errors="replace").split("\n") if newline else []


class Child:
    """A process in its own session; its output goes to a log, because daemons would keep a pipe open after it ends.

    The child ends together with this process, however this process ends: see ``guard``.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path) -> None:
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _GUARD, str(os.getpid()), *command],
                env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def lines(self, on_tick: Callable[[], None] = lambda: None, tick: float = TICK) -> Iterator[str]:
        """Yield each line of output until the child ends, and call `on_tick` every `tick` seconds.

        Raises:
            StageFailed.
        """
        tail = Tail(self.log)
        while True:
            ended = self.process.poll() is not None
            yield from tail.new_lines()
            on_tick()
            if ended:
                break
            time.sleep(tick)
        if self.process.returncode != 0:
            raise StageFailed(f"exit status {self.process.returncode}")

    def end_of_log(self, count: int) -> str:
        """Read the last lines of the log."""
        lines = self.log.read_text(errors="replace").split("\n")
        return "\n".join(line.rsplit("\r", 1)[-1][:300] for line in lines[-count - 1 :]).rstrip()


class Teacher:
    """A vLLM server for the quickstart's own teacher model; it ends together with the quickstart's other processes.

    Args:
        model: folder of the model.
        env: environment of the trainer.
        log: file to which the server's output is written.
        root: root of the checkout.
    """

    def __init__(self, model: Path, env: Mapping[str, str], log: Path, root: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        arguments = [str(model), "--port", str(port), "--max-model-len", str(LENGTH)]
        self.child = Child(["bash", str(SERVER), *arguments], env, log, root)

    def wait(self, on_tick: Callable[[], None]) -> None:
        """Wait until the teacher serves, and call `on_tick` several times a second.

        Raises:
            StageFailed: the teacher ended, or does not serve in time.
        """
        start = time.monotonic()
        while not _answers(f"{self.url}/health"):
            on_tick()
            if self.child.process.poll() is not None:
                raise StageFailed(f"the teacher ended with {self.child.process.returncode}, see {self.child.log}")
            if time.monotonic() - start > SERVES_WITHIN:
                raise StageFailed(f"the teacher did not serve within {SERVES_WITHIN:.0f} s, see {self.child.log}")
            time.sleep(TICK)


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError), opener.open(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def guard() -> NoReturn:
    """Run a command as its parent process; end it and all of its descendants when the supervisor dies.

    A supervisor that is killed (SIGKILL) cannot clean up. The kernel then signals this process, whose arguments are the
    supervisor's pid, the command, and the command's arguments.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    become_subreaper()
    segments = SharedMemoryWatch()
    try:
        die_with_parent(int(sys.argv[1]))
        status = subprocess.Popen(sys.argv[2:]).wait()
    except SystemExit:
        clean_up(segments)
        raise
    sys.exit(status if status >= 0 else 128 - status)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that `setsid` does not hide them (Linux)."""
    _control(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Make the kernel send SIGTERM to this process when its parent dies, or at once if it has already died (Linux)."""
    _control(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _control(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def find_descendants() -> list[psutil.Process]:
    """Find this process's living descendants; for a subreaper, they include those whose own parents have ended."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_descendants(patience: float = 5.0, limit: float = 20.0) -> list[int]:
    """Ask all descendants to end, and then kill those that remain.

    Args:
        patience: seconds between SIGTERM and SIGKILL, for processes that delete their files before they end.
        limit: seconds after which processes that have not ended are left alone.

    Returns:
        The pids of processes that have not ended, normally none.
    """
    start = time.monotonic()
    asked: set[int] = set()
    # Daemons may start other processes while they end, so each round searches again.
    while (remaining := find_descendants()) and (elapsed := time.monotonic() - start) <= limit:
        for process in remaining:
            with contextlib.suppress(psutil.Error):  # psutil checks that the pid still belongs to this process
                if elapsed > patience:
                    process.kill()
                elif process.pid not in asked:
                    asked.add(process.pid)
                    process.terminate()
        psutil.wait_procs(remaining, timeout=0.1)
    return [process.pid for process in remaining]


class SharedMemoryWatch:
    """The segments in /dev/shm that descendants of this process were observed to use.

    Segments are identified by device and inode, because a semaphore is mapped under a name other than its final one.
    """

    def __init__(self, folder: Path = SHM) -> None:
        self._folder = folder
        self._known = set(self._list())
        self._ours: set[Identity] = set()
        self._looked = -math.inf

    def observe(self, every: float = 0.0) -> None:
        """Find the users of segments that have appeared, at most once per interval; this must be called often."""
        if time.monotonic() - self._looked < every:
            return
        self._looked = time.monotonic()
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
    """Read device and inode of files under `folder` that a process has mapped or open; empty if that is impossible."""
    identities: set[Identity] = set()
    prefix = f"{folder}/"
    with contextlib.suppress(OSError):  # the process has ended, or we may not inspect it
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            # A line consists of: address, permissions, offset, device as major:minor in hex, inode, path
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(prefix):
                major, minor = (int(part, 16) for part in fields[3].split(":"))
                identities.add((os.makedev(major, minor), int(fields[4])))
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(descriptor).startswith(prefix):
                    status = descriptor.stat()
                    identities.add((status.st_dev, status.st_ino))
    return identities


def clean_up(segments: SharedMemoryWatch) -> tuple[list[int], list[str]]:
    """End all descendants and remove their segments; return the surviving pids and the names of removed segments."""
    segments.observe()
    return end_descendants(), segments.remove_leaked()
