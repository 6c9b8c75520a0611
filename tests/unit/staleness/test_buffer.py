"""verl's buffer under a limit: what it is made with, what it times, and the names of prompts that are sampled again."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")

from recipe.offpolicy.staleness.ages import AgeLimit  # noqa: E402
from recipe.offpolicy.staleness.buffer import BoundedReplayBuffer, Tally  # noqa: E402
from recipe.offpolicy.staleness.staleness_settings import StalenessSettings  # noqa: E402


def build(too_old: str, **changes: Any) -> BoundedReplayBuffer:
    settings = StalenessSettings.at(2, too_old=too_old)
    given = {"trainer_mode": "separate_async", "trainer_config": {}, "sampler_kwargs": {}} | changes
    return BoundedReplayBuffer(settings, AgeLimit(Fraction(2)), Tally(), lambda prompts: None, 4, **given)


def test_only_the_wait_for_training_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.5, 20.0, 29.0])
    made = build("wait", clock=lambda: next(times))
    monkeypatch.setattr(type(made).__mro__[1], "wait_for_sampleable", lambda self, *args: (set(), {}))
    made.wait_for_sampleable(1, "train", 4)
    made.wait_for_sampleable(1, "val", 4)
    assert made._tally.waited == 2.5
