"""Anchors are frozen once, from right answers alone, and survive a checkpoint."""

from __future__ import annotations

import json

from recipe.offpolicy.extensions.length_penalty.penalties import Anchor, Anchors


def make(**changes: float) -> Anchors:
    return Anchors(**{"pass_rate": 0.9, "min_samples": 16, "window": 64} | changes)  # type: ignore[arg-type]


def answers(right: int, wrong: int, tokens: float = 10.0) -> list[tuple[str, bool, float]]:
    return [("p", True, tokens)] * right + [("p", False, 1000.0)] * wrong


def test_eight_of_eight_once_are_too_few() -> None:
    anchors = make()
    assert anchors.add(1, answers(8, 0)) == 0
    assert anchors.length_of("p") is None
    assert anchors.add(2, answers(8, 0)) == 1
    assert anchors.length_of("p") == 10.0


def test_the_share_has_to_exceed_the_rate_and_wrong_answers_have_no_length() -> None:
    """9 of 10 is not above 0.9; 28 of 30 is, and the anchor is the mean of the 28."""
    anchors = make(min_samples=10)
    assert anchors.add(1, answers(9, 1)) == 0
    assert anchors.add(2, answers(19, 1, tokens=20.0)) == 1
    assert anchors.frozen["p"] == Anchor((9 * 10 + 19 * 20) / 28, 2, 28)


def test_steps_leave_the_window_whole() -> None:
    """Window 8: after a third step of 4 the first is gone, and 8 of 8 are right."""
    anchors = make(min_samples=8, window=8)
    anchors.add(1, answers(0, 4))
    assert anchors.add(2, answers(4, 0)) == 0
    assert anchors.add(3, answers(4, 0, tokens=30.0)) == 1
    assert anchors.length_of("p") == 20.0


def test_a_checkpoint_half_way_gives_the_same_state() -> None:
    whole, first = make(), make()
    for anchors in (whole, first):
        anchors.add(1, [*answers(8, 1), ("q", True, 5.0)])
    second = make()
    second.restore(json.loads(json.dumps(first.to_json())))
    for anchors in (whole, second):
        anchors.add(2, answers(12, 0, tokens=7.0))
    assert second.to_json() == whole.to_json()
    assert second.frozen == whole.frozen
    assert second.length_of("p") == (8 * 10 + 12 * 7) / 20
