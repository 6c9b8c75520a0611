"""verl's buffer under a limit: what it is made with, what it times, and the names of prompts that are sampled again."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("transfer_queue")

from recipe.offpolicy.staleness.ages import AgeLimit  # noqa: E402
from recipe.offpolicy.staleness.buffer import BoundedReplayBuffer, count_refreshes, name_anew  # noqa: E402
from recipe.offpolicy.staleness.staleness_settings import StalenessSettings  # noqa: E402
from recipe.offpolicy.staleness.tally import Tally  # noqa: E402


def build(too_old: str, **changes: Any) -> BoundedReplayBuffer:
    settings = StalenessSettings.at(2, too_old=too_old)
    given = {"trainer_mode": "separate_async", "trainer_config": {}, "sampler_kwargs": {}} | changes
    return BoundedReplayBuffer(settings, AgeLimit(Fraction(2)), Tally(), lambda prompts: None, 4, **given)


@pytest.mark.parametrize(("too_old", "threshold"), [("wait", None), ("drop", 3), ("mask", None), ("refresh", None)])
def test_verl_drops_by_its_own_threshold(too_old: str, threshold: int | None) -> None:
    """It counts the versions that a row spans, one more than its age."""
    made = build(too_old)
    assert (made.max_off_policy_threshold, made.max_off_policy_strategy) == (threshold, "drop")


def test_only_the_wait_for_training_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.5, 20.0, 29.0])
    made = build("wait", clock=lambda: next(times))
    monkeypatch.setattr(type(made).__mro__[1], "wait_for_sampleable", lambda self, *args: (set(), {}))
    made.wait_for_sampleable(1, "train", 4)
    made.wait_for_sampleable(1, "val", 4)
    assert made._tally.waited == 2.5


def test_the_uid_says_how_often_a_prompt_was_sampled_anew() -> None:
    assert [count_refreshes(uid) for uid in ("6ba7-b810", "6ba7-b810.1", "6ba7-b810.12")] == [0, 1, 12]
    assert name_anew(name_anew("6ba7-b810")) == "6ba7-b810.2"
    # verl and ours cut keys of rows at underscores.
    assert f"{name_anew('6ba7-b810')}_0_1".split("_") == ["6ba7-b810.1", "0", "1"]
