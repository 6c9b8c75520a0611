"""A run whose correction keeps no stale token logs the recommended correction once."""

from __future__ import annotations

import logging

import pytest

from recipe.offpolicy.monitor.alarms import StaleRowsWatch

LINE = "correction=opsm correction.masks.opsm.delta=0.1"


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
