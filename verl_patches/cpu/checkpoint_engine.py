"""A checkpoint engine that sends weights from verl's trainer to separate rollouts on a machine without an accelerator.

verl's own engines need a GPU or an RDMA card as transport. This engine transfers the weights in files: the trainer's
first rank writes buckets into a new folder for each synchronisation, and every rollout worker reads them. verl itself
imports this module in each process that sends or receives weights:

    actor_rollout_ref.rollout.checkpoint_engine.backend=cpu_files
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_patches.cpu.checkpoint_engine

verl allows modules to register engines under new names, so this module does not change verl.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from ..contract import Contract, PatchError, logger, of_installed
from ..releases import specifiers

NAME = "cpu_files"
TIMEOUT = 300.0
POLL = 0.01
"""Seconds between checks for the next bucket."""

_KEY = "actor_rollout_ref.rollout.checkpoint_engine"
_BASE = "verl.checkpoint_engine:CheckpointEngine"
_ERROR, _END, _LOCK = "error.json", "end.json", "sender.lock"


_RELEASES = specifiers(lambda release: release.separate_programs)
_BEFORE_PLATFORMS = specifiers(lambda release: release.separate_programs and not release.platforms)


def _method(name: str, signature: str, releases: tuple[str, ...] = _RELEASES) -> Contract:
    return Contract("checkpoint_engine", f"{_BASE}.{name}", signature, distribution="verl", releases=releases)


REGISTRY = Contract(
    "checkpoint_engine", "verl.checkpoint_engine:CheckpointEngineRegistry.register", "(backend)", "verl", _RELEASES
)
CONTRACTS = (
    REGISTRY,
    _method("prepare", "(self)"),
    of_installed(
        _method("build_topology", "(trainer_world_size, rollout_world_size, metadata)", _BEFORE_PLATFORMS),
        _method("build_topology", "(actor_wg_world_size, rollout_world_size, metadata)"),
    ),
    _method("init_process_group", "(self, **kwargs)"),
    _method("finalize", "(self)"),
    _method("send_weights", "(self, weights, global_steps=None)"),
    _method("receive_weights", "(self, global_steps=None)"),
)


class WeightSyncError(RuntimeError):
    """The trainer's weights did not reach a rollout worker; the message says where and why."""


class FileCheckpointEngine(CheckpointEngine):
    """One end of the transport; verl creates an instance in each worker and calls it during a synchronisation.

    Args:
        bucket_size: number of bytes of weights to collect before writing them.
        is_master: whether this process writes the files; the trainer's other ranks only take part in gathering weights.
        timeout: number of seconds that a receiver waits for the next bucket.
        folder: folder in which the files are stored while they are needed; by default, the trainer's temporary folder.
            The trainer and the rollouts must share this folder.

    Attributes:
        clock: function that returns the time in seconds, for the receiver's timeout.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(
        self, bucket_size: int, is_master: bool = False, timeout: float = TIMEOUT, folder: str | None = None
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"{_KEY}.engine_kwargs.{NAME}.timeout={timeout}: expected a number of seconds above 0.")
        self._bucket_size = bucket_size
        self._is_master = is_master
        self._timeout = float(timeout)
        self._parent = folder
        self._owned: tempfile.TemporaryDirectory[str] | None = None
        self._lock: IO[bytes] | None = None
        self._folder: Path | None = None
        self._sender = ""

    def prepare(self) -> dict[str, Any]:
        """Return the input of `build_topology`, that is, the folder and its writer, if this process is the master."""
        if not self._is_master:
            return {"folder": None}
        self.finalize()  # clean up after a failed synchronisation
        self._owned = tempfile.TemporaryDirectory(prefix="verl-weights-", dir=self._parent)
        folder = Path(self._owned.name)
        self._lock = (folder / _LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # the lock is held until this process ends, however it ends
        return {"folder": str(folder), "sender": f"process {os.getpid()} on {socket.gethostname()}"}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Build the arguments of `init_process_group` for each of the trainer's and the rollouts' workers."""
        masters = [entry for entry in metadata if entry["folder"]]
        if len(masters) != 1:
            raise WeightSyncError(
                f"{NAME}: exactly one process of the trainer must write the weights, but there are {len(masters)}."
            )

        def each(world_size: int) -> dict[str, list[Any]]:
            return {key: [value] * world_size for key, value in masters[0].items()}

        return each(actor_wg_world_size), each(rollout_world_size)

    def init_process_group(self, folder: str, sender: str) -> None:
        """Open this end of the transport.

        Raises:
            WeightSyncError: the sender's folder is not on this machine.
        """
        if not (Path(folder) / _LOCK).exists():
            raise WeightSyncError(
                f"{_KEY}.backend={NAME}: {folder}, to which the trainer ({sender}) writes weights, does not exist on "
                f"{socket.gethostname()}. Fix: set {_KEY}.engine_kwargs.{NAME}.folder to a folder that all machines "
                f"share, or use one machine for trainer and rollouts."
            )
        self._folder, self._sender = Path(folder), sender

    def finalize(self) -> None:
        """Close this end of the transport; the master also removes the files."""
        if self._lock is not None:
            self._lock.close()
        if self._owned is not None:
            self._owned.cleanup()
        self._folder = self._owned = self._lock = None

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """Write all weights; on ranks other than the master, only take part in gathering them.

        Raises:
            WeightSyncError: there are no weights.
            OSError: the weights cannot be written. Receivers are notified of this and of any other failure.
        """
        if not self._is_master:
            for _ in weights:
                pass  # all ranks take part in gathering each weight
            return
        try:
            count = 0
            for count, bucket in enumerate(_buckets(weights, self._bucket_size), start=1):
                self._publish(_bucket_name(count - 1), {"global_steps": global_steps, "weights": bucket})
            if not count:
                raise WeightSyncError(f"{NAME}: the trainer's model has no weights to send.")
            self._publish(_END, {"buckets": count})
        except BaseException as error:
            with suppress(OSError):  # the disk may be the cause; the released lock also alerts receivers
                self._publish(_ERROR, {"error": f"{type(error).__name__}: {error}"})
            raise

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield (name, weight) as the sender writes them.

        Raises:
            WeightSyncError: the sender failed, exited, wrote nothing within the timeout, or sends the weights of
                another step.
        """
        for index in itertools.count():
            path = await self._next_bucket(index, global_steps)
            if path is None:
                return
            bucket = torch.load(path, weights_only=True, mmap=True)
            if bucket["global_steps"] != global_steps:
                raise WeightSyncError(
                    f"{NAME}: expected the weights of step {global_steps}, but {self._sender} sends those of step "
                    f"{bucket['global_steps']}."
                )
            for name, weight in bucket["weights"].items():
                yield name, weight

    async def _next_bucket(self, index: int, global_steps: int | None) -> Path | None:
        """Wait for the next bucket and return its file; None after the last bucket."""
        assert self._folder is not None, "verl calls init_process_group first"
        path = self._folder / _bucket_name(index)
        failed = f"{NAME}: the weights of step {global_steps} did not arrive in {self._folder}: {self._sender}"
        deadline = self.clock() + self._timeout
        while not path.exists():
            end, error = (_read(self._folder / name) for name in (_END, _ERROR))
            if end is not None and index >= end["buckets"]:
                return None
            if error is not None:
                raise WeightSyncError(f"{failed}, the sender, failed with {error['error']}")
            if end is None and not self._sender_lives():
                raise WeightSyncError(f"{failed}, the sender, exited after {index} buckets. See the trainer's log.")
            if self.clock() > deadline:
                raise WeightSyncError(
                    f"{failed}, the sender, is alive but wrote nothing for {self._timeout:g} s after {index} "
                    f"buckets. To wait longer, set {_KEY}.engine_kwargs.{NAME}.timeout=SECONDS."
                )
            await asyncio.sleep(POLL)
        return path

    def _sender_lives(self) -> bool:
        assert self._folder is not None
        try:
            with (self._folder / _LOCK).open("rb") as lock:
                # The sender holds the lock while its process lives, so if a receiver cannot take the lock, the sender
                # is alive.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False

    def _publish(self, name: str, content: dict[str, Any]) -> None:
        """Write a file atomically."""
        assert self._folder is not None, "verl calls init_process_group first"
        draft = self._folder / f"{name}.draft"
        if name.endswith(".json"):
            draft.write_text(json.dumps(content))
        else:
            torch.save(content, draft)
        draft.replace(self._folder / name)


def _buckets(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterable[dict[str, Tensor]]:
    """Yield copies of the weights in order, in groups of at least `size` bytes; only the last one may be smaller."""
    bucket: dict[str, Tensor] = {}
    held = 0
    for name, weight in weights:
        # Weights are copied, because verl may reuse the storage, and because saving a view would save its whole
        # storage.
        bucket[name] = weight.detach().to("cpu", copy=True).contiguous()
        held += bucket[name].nbytes
        if held >= size:
            yield bucket
            bucket, held = {}, 0
    if bucket:
        yield bucket


def _bucket_name(index: int) -> str:
    return f"{index:06d}.pt"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return content


def install() -> None:
    """Register the engine, once.

    Raises:
        PatchError: verl's base class differs from the one for which this engine was written.
    """
    for contract in CONTRACTS:
        contract.check()
    # Without this check, a release with an additional abstract method would fail at the first synchronisation, minutes
    # into the run.
    if missing := sorted(getattr(FileCheckpointEngine, "__abstractmethods__", ())):
        raise PatchError(REGISTRY.moved(f"a CheckpointEngine that also requires {', '.join(missing)}"))
    if not in_force():
        CheckpointEngineRegistry.register(NAME)(FileCheckpointEngine)
        logger.info("patch %s in force: verl checkpoint engine %r", REGISTRY.name, NAME)


def in_force() -> bool:
    """Return True if the engine is registered in this process."""
    try:
        return CheckpointEngineRegistry.get(NAME) is FileCheckpointEngine
    except (KeyError, ValueError):
        # verl's registry raises an error for an unknown name; up to 0.9.0, the error is a KeyError.
        return False


install()
