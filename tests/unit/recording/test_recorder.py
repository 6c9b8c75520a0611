"""The recorder's two threads: when they write, and what they leave out instead of waiting."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.offpolicy.batch.plan import UpdateRows
from recipe.offpolicy.recording import Recording, files
from recipe.offpolicy.recording import writer as writer_module
from recipe.offpolicy.recording.recorder import Recorder
from recipe.offpolicy.recording.run import RecordSettings
from recipe.offpolicy.recording.writer import Packed, Seen, pack
from tests.support.recorder_clock import Clock

UPDATE = UpdateRows(ranks=1, rows=4, mini_batch_rows=2)
SPEC: dict[str, Any] = {"masks": {}}


HANGS = 300.0
"""Seconds after which a transfer counts as hanging."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


_MADE: list[Recorder] = []


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    while _MADE:
        assert _MADE.pop().flush(HANGS)


@pytest.fixture
def recorder(tmp_path: Path, clock: Clock) -> Recorder:
    return made(tmp_path, clock)


def made(folder: Path, clock: Clock, rank: int = 0, ranks: int = 1, **settings: Any) -> Recorder:
    _MADE.append(Recorder(RecordSettings.at(str(folder / "rec"), **settings), rank=rank, ranks=ranks, clock=clock))
    return _MADE[-1]


def rows(count: int = 2, first: int = 0, width: int = 3) -> Packed:
    number = torch.arange(first, first + count)[:, None].expand(-1, width)
    ones = torch.ones(count, width)
    return pack(
        Seen(
            response_ids=number,
            response_mask=ones.bool(),
            rollout_log_prob=-ones,
            old_log_prob=-ones,
            log_prob=-ones,
            advantages=ones,
            weight=ones,
            valid=ones.bool(),
            rejected={},
            uids=[str(i) for i in range(first, first + count)],
        )
    )


def micro_batch(
    recorder: Recorder,
    step: int = 1,
    update: UpdateRows = UPDATE,
    *,
    first: int = 0,
    count: int = 2,
    spec: dict[str, Any] = SPEC,
    width: int = 3,
) -> int | None:
    """Announce and hand over one micro-batch as the loss does."""
    mini_batch = recorder.admit(step, update, count)
    if mini_batch is not None:
        recorder.put(step, update, mini_batch, rows(count, first, width), spec, ())
    return mini_batch


def written(recorder: Recorder) -> list[str]:
    folder = Path(recorder.settings.dir)
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def settled(recorder: Recorder) -> list[str]:
    """Return what is written once the thread is idle, without closing open files."""
    with recorder._condition:
        assert recorder._condition.wait_for(lambda: not recorder._items and not recorder._busy, HANGS)
    return written(recorder)


def updated(recorder: Recorder, specs: list[dict[str, Any]], step: int = 1) -> list[str]:
    """A step of an update of 4 rows in 2 gradient steps for each of ``specs``; row numbers continue."""
    for update, spec in enumerate(specs):
        plan = replace(UPDATE, update=update, updates=len(specs), gradient_steps=2 * update)
        for half in range(2):
            micro_batch(recorder, step, plan, first=4 * update + 2 * half, spec=spec)
        assert len(settled(recorder)) == update + 1
    return settled(recorder)


def test_each_update_of_a_step_has_a_file(recorder: Recorder) -> None:
    """The second update's rows were recorded after 2 and 3 gradient steps."""
    assert updated(recorder, [SPEC, SPEC]) == [
        "step_00000001.update_0000.rank_00000.parquet",
        "step_00000001.update_0001.rank_00000.parquet",
    ]
    found = Recording(recorder.settings.dir).step(1).rows
    assert found.mini_batch.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found.uid.tolist() == [str(i) for i in range(8)]


# What does not wait ---------------------------------------------------------------------------------------------


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that accepts nothing until the event is set, so a thread that waits for it hangs."""
    free = threading.Event()
    original = files.write

    def write(*args: Any, **kwargs: Any) -> int:
        free.wait()
        return original(*args, **kwargs)

    monkeypatch.setattr(writer_module, "write", write)
    yield free
    free.set()


def test_a_disk_that_hangs_costs_rows_and_no_time(tmp_path: Path, clock: Clock, slow_disk: threading.Event) -> None:
    """There is room for three updates of rows, of which the first two wait for the disk."""
    size = rows(4).nbytes
    recorder = made(tmp_path, clock, max_waiting_bytes=2.5 * size)
    for step in range(1, 6):
        micro_batch(recorder, step=step, count=4)
    assert recorder.take().dropped_rows == 12
    slow_disk.set()
    assert settled(recorder) == ["step_00000001.rank_00000.parquet", "step_00000002.rank_00000.parquet"]
    # What was written makes room again.
    micro_batch(recorder, step=6, count=4)
    assert len(settled(recorder)) == 3
    assert recorder.take().dropped_rows == 0


def test_a_step_that_does_not_fit_is_recorded_in_part(
    recorder: Recorder, clock: Clock, warnings: pytest.LogCaptureFixture
) -> None:
    """Steps of 8 s allow 0.4 s: of four micro-batches that take 0.2 s each, two are recorded; in the first step, 1 s,
    all are.
    """
    admitted = []
    for step in range(1, 5):
        for place in range(4):
            found = micro_batch(recorder, step=step, count=1, first=4 * step + place)
            if found is not None:
                recorder.spent(0.2)
                admitted.append((step, place))
        clock.now += 8.0
    # The second step tries what was measured in the first.
    assert admitted == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 3), (4, 1), (4, 3)]
    assert recorder.take().dropped_rows == 6
    assert [record.getMessage() for record in warnings.records] == [
        "offpolicy.record.share=1: recording would take more than 0.4 s of this step (limit: 0.05 of the last "
        "step's duration, or 1 s in the first step). Rows are dropped evenly over the step, and training continues. "
        "Set offpolicy.record.share=0.5 or offpolicy.record.prompts=false."
    ]


def test_a_full_disk_stops_the_recording_and_nothing_else(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    micro_batch(recorder, count=4)
    assert len(settled(recorder)) == 1

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer_module, "write", full)
    for step in (2, 3):
        micro_batch(recorder, step=step, count=4)
        settled(recorder)
    counters = recorder.take()
    assert (counters.rows, counters.dropped_rows) == (8, 8)
    (record,) = warnings.records
    assert record.getMessage() == (
        f"offpolicy.record.dir={recorder.settings.dir}: {os.strerror(errno.ENOSPC)}. Fix: free space there, or set "
        "another directory. Recording stops, and training continues."
    )


# What stops it --------------------------------------------------------------------------------------------------


def test_the_size_budget_stops_the_recording(tmp_path: Path, clock: Clock, warnings: pytest.LogCaptureFixture) -> None:
    """Two ranks share the budget, so this rank has half of it, which is two and a half files."""
    probe = made(tmp_path / "probe", clock)
    micro_batch(probe, count=4)
    (name,) = settled(probe)
    size = (Path(probe.settings.dir) / name).stat().st_size

    recorder = made(tmp_path, clock, ranks=2, max_bytes=5 * size)
    for step in range(1, 7):
        micro_batch(recorder, step=step, count=4)
        settled(recorder)
    assert written(recorder) == ["step_00000001.rank_00000.parquet", "step_00000002.rank_00000.parquet"]
    assert micro_batch(recorder, step=7, count=4) is None
    counters = recorder.take()
    assert counters.rows == 12  # the third was on its way
    assert counters.dropped_rows == 20
    (record,) = warnings.records
    assert record.getMessage() == (
        f"offpolicy.record.max_bytes={5 * size:g}: rank 0 has used up its share of {2.5 * size:g} bytes. Fix: raise "
        f"the limit, or record less by setting offpolicy.record.every=10 or offpolicy.record.share=0.1. Recording "
        f"stops, and training continues."
    )


def test_what_a_killed_process_was_writing_is_removed(recorder: Recorder) -> None:
    folder = Path(recorder.settings.dir)
    folder.mkdir()
    for name in ("step_00000003.rank_00000.partial", "step_00000003.rank_00001.partial", "notes.partial"):
        (folder / name).touch()
    micro_batch(recorder, count=4)
    assert settled(recorder) == [
        "notes.partial",
        "step_00000001.rank_00000.parquet",
        "step_00000003.rank_00001.partial",
    ]
