"""One recommendation for asynchronous and stale data, in the code and in the documents."""

from __future__ import annotations

import logging

import pytest

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.monitor.alarms import StaleRowsWatch
from recipe.offpolicy.preflight.checks.staleness import warn_asynchronous
from recipe.offpolicy.preflight.composed import Composed
from tests.support.applications import NEEDED, application

LINE = "correction=opsm correction.masks.opsm.delta=0.1"


@pytest.mark.verl("==0.9.1")
def test_an_uncorrected_asynchronous_run_is_told_of_it() -> None:
    with application("correction=none", "trainer.v1.trainer_mode=colocate_async", *NEEDED) as config:
        (note,) = warn_asynchronous(Composed(config, CorrectionSpec()))
    assert note.verdict == "NOTE"
    assert LINE in note.fix


# Bounds for equal weights meet stale rows ---------------------------------------------------------------------


def test_a_run_that_keeps_no_stale_token_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def update(kept: float, tokens: float = 1000.0) -> dict[str, float]:
        fresh = {"staleness/is0/token_count": 5000.0, "staleness/is0/keep_token_share": 0.9}
        ages = {"staleness/is1/token_count": tokens, "staleness/is1/keep_token_share": kept}
        return fresh | ages | {"staleness/is2/token_count": 0.0, "staleness/is2/keep_token_share": float("nan")}

    watch = StaleRowsWatch()
    with caplog.at_level(logging.WARNING, "verl.offpolicy"):
        warned = []
        for one in (update(0.0), update(0.5), update(0.01), update(0.0), update(0.0)):
            watch.see(one)
            warned.append(len(caplog.records))
    assert warned == [0, 0, 0, 1, 1]
    assert "keeps 0.000 of the tokens that were sampled with older weights, 1000 in this update" in caplog.text
    assert LINE in caplog.text
    young = StaleRowsWatch()
    for values in [update(0.0, tokens=50.0)] * 5 + [{}] * 5:
        young.see(values)
    assert len(caplog.records) == 1
