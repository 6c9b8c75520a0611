"""Verdicts on what Megatron's routers did."""

from __future__ import annotations

import pytest

from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.replay.megatron_engine import MegatronReport, judge_megatron

REPORT = MegatronReport(layers=(1, 3), tokens=36, forwarded=40, placed=True)


def test_the_sentence_says_what_was_compared() -> None:
    other = MegatronReport(layers=(3, 1), tokens=0, forwarded=8, placed=True)
    assert judge_megatron([REPORT, other], "R3") == (
        "routing replay R3 LIVE on Megatron, in layers [1, 3] of the last stage: 75.0% of tokens sent to the experts "
        "that verl's RouterReplay names, which equal the shipped routes."
    )
    split = MegatronReport(layers=(1,), tokens=4, forwarded=4, placed=False)
    assert judge_megatron([REPORT, split], "R2").endswith(
        "which were not compared with the shipped routes, because verl splits these."
    )


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ([], "mode=R3, but no router of the last stage replays"),
        ([MegatronReport((), 0, 0, True)], "no router of the last stage replays"),
        ([MegatronReport((1, 3), 0, 40, True)], "2 layers replayed no token"),
    ],
    ids=str,
)
def test_an_update_in_which_nothing_was_replayed_stops_the_run(reports: list[MegatronReport], words: str) -> None:
    with pytest.raises(LivenessError, match=words):
        judge_megatron(reports, "R3")
