"""What the recorder reports of itself with each micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipe.offpolicy.recording.ranks import Place
from recipe.offpolicy.recording.recorder import Counters
from recipe.offpolicy.recording.worker_hook import is_chosen, take_statistics


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


def test_a_share_of_prompts_is_the_same_on_every_rank_and_grows() -> None:
    uids = [f"prompt-{number}" for number in range(1000)]
    half = {uid for uid in uids if is_chosen(uid, 0.5)}
    assert 440 < len(half) < 560  # four standard deviations of a fair draw
    assert {uid for uid in uids if is_chosen(uid, 0.1)} < half
    assert all(is_chosen(uid, 1.0) for uid in uids)
    assert not any(is_chosen(uid, 0.0) for uid in uids)
