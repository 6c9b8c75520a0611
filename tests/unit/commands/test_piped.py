"""Tables where standard output is no terminal: 100 characters, with nothing cut."""

from __future__ import annotations

import json
from pathlib import Path

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


def _metrics(tmp_path: Path, **data: float) -> str:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step in (1, 2)))
    return str(path)


def test_lengths_say_what_is_missing_and_how_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The metrics of a run without length_penalty have the length of all answers alone."""
    assert lengths.main([_metrics(tmp_path, **{"response_length/mean": 6.5, "critic/score/mean": 0.4})]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "No value for right, wrong, easy, hard: these metrics have no length/<class>/mean" in shown
    assert "length_penalty=none" in shown
    whole = {"response_length/mean": 6.5} | {f"length/{name}/mean": 5.0 for name in ("right", "wrong", "easy", "hard")}
    assert lengths.main([_metrics(tmp_path, **whole)]) == 0
    assert "No value" not in capsys.readouterr().out
    assert lengths.main([HEALTHY, "--correct-at-least", "7"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "No value for right, easy: an answer is right from a score of 7 on" in shown
