"""What a run saw of its weights' delivery is told apart from staleness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.offpolicy.analysis.attribution.attribution import attribute, describe_recorded_faults
from recipe.offpolicy.analysis.attribution.partial_causes import ROUNDED, UNDELIVERED, judge_delivery
from recipe.offpolicy.recording import Recording, RecordingError
from tests.support.paths import ROOT

RECORDINGS = ROOT / "tests" / "data" / "faults" / "held_out"
EQUAL = {"step": 1, "verdict": "equal", "along": 0.9, "square": 1.0}
WRONG = {"step": 2, "verdict": "different", "sentence": "12 of 26 tensors differ."}


@pytest.mark.parametrize(
    ("lines", "verdicts"),
    [
        ([], []),
        ([EQUAL, EQUAL], ["absent", "absent"]),
        ([EQUAL, WRONG], ["present", "absent"]),
        ([EQUAL | {"along": 0.016}], ["absent", "present"]),
        ([EQUAL | {"along": 0.0, "square": 0.0}], ["absent", "not testable"]),
    ],
)
def test_verdicts(lines: list[Any], verdicts: list[str]) -> None:
    causes = judge_delivery(lines)
    assert [cause.verdict for cause in causes] == verdicts
    assert [cause.name for cause in causes] == [UNDELIVERED, ROUNDED][: len(verdicts)]


def copy_recording(folder: Path, *lines: str, source: str = "colocate_async-14") -> Recording:
    for path in (RECORDINGS / source).iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "delivery.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return Recording(folder)


def test_it_stands_next_to_staleness(tmp_path: Path) -> None:
    recording = copy_recording(tmp_path, json.dumps(EQUAL), json.dumps(WRONG))
    found = {cause.name: cause.verdict for cause in attribute(recording).causes}
    assert found[UNDELIVERED] == "present"
    assert found["stale weights"] == "present"
    assert UNDELIVERED in attribute(recording).mend_first


def test_updates_that_are_rounded_away_are_told_from_staleness(tmp_path: Path) -> None:
    """In both the KL grows from step to step; rounding explains it only if all weights were delivered."""
    lines = [(EQUAL | {"along": 0.13},), (EQUAL,), (EQUAL | {"along": 0.13}, WRONG)]
    folders = [tmp_path / str(number) for number in range(len(lines))]
    verdicts = []
    for folder, delivered in zip(folders, lines, strict=True):
        folder.mkdir()
        recording = copy_recording(folder, *map(json.dumps, delivered), source="stale-2-7")
        found = attribute(recording)
        assert describe_recorded_faults(recording, recording.card) == found.mend_first
        verdicts.append({cause.name: cause.verdict for cause in found.causes})
        assert ("stale weights" in found.mend_first) == (delivered != lines[0])
    assert [(each[ROUNDED], each["stale weights"]) for each in verdicts] == [
        ("present", "not testable"),
        ("absent", "present"),
        ("present", "present"),
    ]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    recording = copy_recording(tmp_path, "{")
    with pytest.raises(RecordingError, match=r"delivery\.jsonl"):
        list(recording.delivery)
