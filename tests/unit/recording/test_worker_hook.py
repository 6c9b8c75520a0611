"""What the recorder reports of itself with each micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipe.offpolicy.recording.ranks import Place
from recipe.offpolicy.recording.recorder import Counters
from recipe.offpolicy.recording.worker_hook import take_statistics


class Idle:
    """A recorder that has written three rows."""

    stopped: str | None = None

    def take(self) -> Counters:
        return replace(Counters(), rows=3, bytes=100, seconds=0.5)


def reported(recorder: Any, place: Place) -> dict[str, float]:
    return {name: statistic.value() for name, statistic in take_statistics(recorder, place).items()}


def test_sums_and_a_flag_of_the_rank_that_writes() -> None:
    recorder = Idle()
    found = reported(recorder, Place(rank=0, writes=True))
    assert found == {
        "record/rows": 3.0,
        "record/dropped_rows": 0.0,
        "record/bytes": 100.0,
        "record/seconds": 0.5,
        "record/stopped": 0.0,
    }
    recorder.stopped = "the disk is full"
    assert reported(recorder, Place(rank=0, writes=True))["record/stopped"] == 1.0
    assert reported(recorder, Place(rank=0, writes=False))["record/stopped"] == 0.0
