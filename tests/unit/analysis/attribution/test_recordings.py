"""The cause finder on recordings of real runs of verl, Ray and vLLM, made by scripts/evidence/injected_faults.

Thresholds were chosen on ``tuning`` alone; ``held_out`` are other runs with other seeds and other strengths of the
faults.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "evidence"))

from injected_faults.cases import CASES, FaultCase, Part
from injected_faults.evaluate import DATA, Judged, judged

from recipe.offpolicy.analysis.attribution.cause import NAMES
from recipe.offpolicy.recording import Recording


@pytest.fixture(scope="module")
def results() -> dict[Part, list[Judged]]:
    return {"tuning": judged("tuning"), "held_out": judged("held_out")}


def folder(case: FaultCase) -> Path:
    return DATA / case.part / f"{case.name}-{case.seed}"


def test_every_cause_is_in_both_parts_and_so_is_none() -> None:
    for part in ("tuning", "held_out"):
        injected = [case.causes for case in CASES if case.part == part]
        assert frozenset() in injected
        assert set().union(*injected) == set(NAMES)


@pytest.mark.slow
def test_held_out_runs_were_never_used_for_tuning() -> None:
    """Other seeds of the data, and no row in common: verl draws a uid for each prompt of each run."""
    seeds: dict[Part, set[int]] = {"tuning": set(), "held_out": set()}
    uids: dict[Part, set[str]] = {"tuning": set(), "held_out": set()}
    for case in CASES:
        seeds[case.part].add(case.seed)
        uids[case.part].update(map(str, Recording(folder(case)).rows().uid))
    assert all(uids.values())
    assert not seeds["tuning"] & seeds["held_out"]
    assert not uids["tuning"] & uids["held_out"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.part}-{case.name}-{case.seed}")
def test_recordings_are_what_the_cases_say(case: FaultCase) -> None:
    recording = Recording(folder(case))
    assert recording.steps == list(range(1, case.steps + 1))
    injected = json.loads((folder(case) / "run.json").read_text())["injected"]
    assert injected["causes"] == sorted(case.causes)
    assert injected["environment"] == dict(case.environment)
    assert injected["overrides"] == list(case.overrides)


def test_small_enough_to_be_kept() -> None:
    assert sum(file.stat().st_size for file in DATA.rglob("*") if file.is_file()) < 2_000_000


@pytest.mark.slow
def test_all_tuning_cases_are_right(results: dict[Part, list[Judged]]) -> None:
    assert {one.case.name: set(one.found) for one in results["tuning"]} == {
        one.case.name: set(one.case.causes) for one in results["tuning"]
    }


@pytest.mark.slow
def test_all_cases_not_used_for_tuning_are_right(results: dict[Part, list[Judged]]) -> None:
    assert {one.case.name: set(one.found) for one in results["held_out"]} == {
        one.case.name: set(one.case.causes) for one in results["held_out"]
    }
    assert sum(len(one.found) for one in results["held_out"]) == 14


@pytest.mark.slow
def test_fixes_name_what_was_injected(results: dict[Part, list[Judged]]) -> None:
    """Not verdicts alone: temperatures to the second digit, and no more mass missing than top-p leaves out."""
    found = {one.case.name: {c.name: c for c in one.causes} for one in results["held_out"]}
    assert found["temperature-1.2"]["temperature"].evidence["slope"] == pytest.approx(1 / 1.2, abs=0.01)
    # Log-probs before a temperature of 0.7, held against the trainer's at 0.7.
    assert found["raw-0.7"]["temperature"].evidence["slope"] == pytest.approx(0.7, abs=0.01)
    assert 0 < found["top_p-0.7"]["truncated sampling"].evidence["missing"] < 0.3


@pytest.mark.slow
def test_a_kept_cache_is_told_from_old_weights(results: dict[Part, list[Judged]]) -> None:
    """Where prompts come again next to new ones: in one run with the trainer's weights, in others with older ones."""
    found = {
        (part, one.case.name): {c.name: c for c in one.causes}["stale weights"]
        for part in results
        for one in results[part]
    }
    cache, cleared = found["held_out", "cache-9"], found["held_out", "cache-1"]
    assert "prefix cache holds keys and values computed with older weights" in cache.sentence
    assert "enable_prefix_caching=False" in cache.fix
    assert cache.evidence["again_low"] > 10
    assert cleared.evidence["again_high"] < 3
    for weights in (found["tuning", "stale-4"], found["held_out", "stale-3"]):
        assert "the engine does not sample with the trainer's weights" in weights.sentence
        assert "prefix cache holds" not in weights.sentence
        assert "max_off_policy_threshold" in weights.fix
