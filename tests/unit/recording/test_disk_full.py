"""A disk that is really full: a file system of a few pages, which root may mount."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recipe.offpolicy.batch.plan import UpdateRows
from recipe.offpolicy.recording import Recording
from recipe.offpolicy.recording.recorder import Recorder
from recipe.offpolicy.recording.run import RecordSettings
from recipe.offpolicy.recording.writer import Seen, pack

PAGES = 16
UPDATE = UpdateRows(ranks=1, rows=8, mini_batch_rows=8)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """64 KiB, mounted in this test alone."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = f"size={PAGES * 4}k,mode=0777"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def one_step(recorder: Recorder, step: int) -> None:
    """8 rows of 100 tokens whose log-probs no compression makes smaller: about 16 kB."""
    generator = torch.Generator().manual_seed(step)
    shape, ones = (8, 100), torch.ones(8, 100)
    mu, old, pi = (-torch.rand(shape, generator=generator) for _ in range(3))
    mini_batch = recorder.admit(step, UPDATE, 8)
    if mini_batch is None:
        return
    seen = Seen(ones.long(), ones.bool(), mu, old, pi, ones, ones, ones.bool(), {})
    recorder.put(step, UPDATE, mini_batch, pack(seen), {}, ())


def test_a_full_disk_stops_the_recording_and_nothing_else(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(RecordSettings.at(str(small_disk / "rec")), rank=0, ranks=1)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 20):
            one_step(recorder, step)
            assert recorder.flush(timeout=300.0)
    steps = Recording(small_disk / "rec").steps
    assert 1 <= len(steps) < PAGES
    assert steps == list(range(1, len(steps) + 1))
    # What is there is whole, and nothing else is.
    assert Recording(small_disk / "rec").rows().tokens == 800 * len(steps)
    assert len(list((small_disk / "rec").iterdir())) == len(steps)
    counters = recorder.take()
    assert (counters.rows, counters.dropped_rows) == (8 * (len(steps) + 1), 8 * (19 - len(steps)))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"offpolicy.record.dir={small_disk / 'rec'}: {os.strerror(28)}. Fix: free space there, or set another "
        f"directory. Recording stops, and training continues."
    )
