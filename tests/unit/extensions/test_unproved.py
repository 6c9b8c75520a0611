"""An add-on that never has an effect is reported repeatedly, and is not called live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.extensions.add_on import Extension
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.length_penalty.length_penalty import LengthPenalty
from recipe.offpolicy.extensions.pass_at_k.pass_at_k import PassAtK
from tests.support.distilled import Run
from tests.support.fake_teacher import FakeTeacher, serving
from tests.support.shaped import Rows, estimate, make_batch, report

ACTOR = {"actor": {"strategy": "fsdp2"}, "rollout": {"n": 4}}
CONFIG = OmegaConf.create({"algorithm": {"adv_estimator": "grpo"}, "actor_rollout_ref": ACTOR})
HALF_RIGHT: Rows = [("a", 3, 0.5), ("a", 5, 0.0), ("a", 4, 0.5), ("a", 6, 0.0)]
ONE_RIGHT: Rows = [("a", 3, 1.0), *[("a", 3, 0.0)] * 3]


class Updates:
    """Updates of one extension on the V0 trainer."""

    def __init__(self, made: Extension) -> None:
        self.made, self.hooks = made, AddOns([made])
        self.hooks.begin(CONFIG)
        self.step = 0

    def take(self, rows: Rows) -> float:
        """Run one update, and return whether the extension counts as live."""
        self.step += 1
        view = make_batch(rows, self.step)
        self.hooks._prompts_seen = True
        self.hooks.compute_advantages(view, estimate(view))
        self.hooks.judge([{self.made.section: each} for each in report(view, self.made)])
        return self.hooks.metrics()[f"offpolicy/live/{self.made.section}"]


CASES: dict[str, tuple[Callable[[], Extension], Rows, Rows, str]] = {
    "rewards that are never right": (
        lambda: PassAtK("pass_at_k", {"objective": "loo", "k": 2}),
        HALF_RIGHT,
        ONE_RIGHT,
        "the highest reward was 0.5, but pass_at_k.correct_at_least=1, so no answer counts as correct",
    ),
    "no anchor": (
        lambda: LengthPenalty("length_penalty", {"kind": "anchor", "anchor": {"min_samples": 3, "pass_rate": 0.7}}),
        HALF_RIGHT,
        [("b", tokens, 1.0) for tokens in (3, 4, 5, 6)],
        "no prompt has an anchor, because no prompt had a pass rate above 0.7 over at least 3 rollouts "
        "(length_penalty.anchor.pass_rate",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_never_acts_is_said_at_doubling_intervals(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, idle, acting, said = CASES[name]
    updates = Updates(make())
    assert {updates.take(idle) for _ in range(11)} == {0.0}
    assert [f"after {count} updates: {said}" in caplog.text for count in (5, 10)] == [True] * 2
    assert caplog.text.count("is still unproved") == 2
    assert [updates.take(acting) for _ in range(3)][-1] == 1.0
    assert {updates.take(idle) for _ in range(6)} == {1.0}
    assert caplog.text.count("is still unproved") == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eligible": {"passed_above": -1.0}}, "no rollout was eligible (opd.eligible.passed_above=-1"),
        ({"max_gap": 5e-4}, "no log-prob of the teacher differs from the student's by more than 0.001 nats"),
    ],
)
def test_a_teacher_without_a_word_is_not_live(changes: dict[str, Any], said: str) -> None:
    with serving(FakeTeacher()) as teacher:
        teacher.answering.set()
        run = Run(teacher.url, "loss", **changes)
    assert said in (run.opd.unproved() or "")
