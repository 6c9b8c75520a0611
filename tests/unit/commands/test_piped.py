"""Tables where standard output is no terminal: 100 characters, with nothing cut."""

from __future__ import annotations

import pytest

from recipe.offpolicy import attribute, calibrate, lengths, whatif
from tests.support.paths import ROOT

HEALTHY = str(ROOT / "tests/data/faults/held_out/healthy-10")
STACK = "correction=[tis_token,gsm,opsm]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "arguments", "shown"),
    [
        (attribute.main, [], ["95.9%", "0.001358"]),
        (calibrate.main, ["--spec", STACK, "--target-kept", "0.98", "--target-ess", "0.9"], ["[0.9821, 1.0182]"]),
        (whatif.main, ["--spec", "correction=[tis_token,gsm]", "--grid", "correction.masks.gsm.upper=1.001,1.01"], []),
        (lengths.main, [], ["6.6"]),
    ],
    ids=["attribute", "calibrate", "whatif", "lengths"],
)
def test_tables_in_a_pipe_have_100_characters(
    main: object, arguments: list[str], shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(main)
    main([HEALTHY, *arguments])
    printed = capsys.readouterr().out
    tables = [line for line in printed.splitlines() if line[:1] in "┏┃┡│└"]
    assert tables
    assert max(map(len, tables)) <= 100
    assert "…" not in printed
    assert all(text in printed for text in shown)
