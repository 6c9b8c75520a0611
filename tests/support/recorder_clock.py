"""A clock for the recorders that a loss makes, so that no test depends on how busy the machine is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest


class Clock:
    """Seconds that pass only where a test says so: recording takes none, and no row is left out."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def recorder_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The clock of all recorders that are made in a test; what they hold is written when it ends."""
    from recipe.offpolicy.recording import recorder

    clock = Clock()
    monkeypatch.setattr(recorder, "Recorder", partial(recorder.Recorder, clock=clock))
    yield clock
    recorder.flush_all()
