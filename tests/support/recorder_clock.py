"""A clock for the recorders of a loss, so that no test depends on the load of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest


class Clock:
    """Seconds that pass only when a test says so: recording takes no time, and no row is left out."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def recorder_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The clock of all recorders of a test; their data are written when the test ends."""
    from recipe.offpolicy.recording import recorder

    clock = Clock()
    monkeypatch.setattr(recorder, "Recorder", partial(recorder.Recorder, clock=clock))
    yield clock
    recorder.flush_all()
