"""The cause finder on recordings of real runs of verl, Ray and vLLM, made by scripts/evidence/injected_faults.

Thresholds were chosen only on ``tuning``; ``held_out`` are other runs with other seeds and other sizes of the faults.
"""

from __future__ import annotations

import sys

import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "evidence"))

from injected_faults.cases import CASES, DATA, FaultCase

from recipe.offpolicy.analysis.attribution.cause import Cause
from recipe.offpolicy.analysis.attribution.causes import find_causes
from recipe.offpolicy.recording import Recording


@pytest.fixture(scope="module")
def held_out() -> list[tuple[FaultCase, list[Cause]]]:
    """Each case, and the causes found in its rows alone; the search does not read the card."""
    cases = [case for case in CASES if case.part == "held_out"]
    return [(case, find_causes(Recording(DATA / case.part / f"{case.name}-{case.seed}").rows(), {})) for case in cases]


@pytest.mark.slow
def test_all_cases_not_used_for_tuning_are_right(held_out: list[tuple[FaultCase, list[Cause]]]) -> None:
    found = {case.name: {cause.name for cause in causes if cause.verdict == "present"} for case, causes in held_out}
    assert found == {case.name: set(case.causes) for case, _ in held_out}
    assert sum(map(len, found.values())) == 14


@pytest.mark.slow
def test_fixes_name_what_was_injected(held_out: list[tuple[FaultCase, list[Cause]]]) -> None:
    """The numbers are checked as well: temperatures to the second digit, a missing mass of at most what top-p removes,
    and a cache.
    """
    found = {case.name: {c.name: c for c in causes} for case, causes in held_out}
    assert found["temperature-1.2"]["temperature"].evidence["slope"] == pytest.approx(1 / 1.2, abs=0.01)
    # Log-probs before a temperature of 0.7, held against the trainer's at 0.7.
    assert found["raw-0.7"]["temperature"].evidence["slope"] == pytest.approx(0.7, abs=0.01)
    assert 0 < found["top_p-0.7"]["truncated sampling"].evidence["missing"] < 0.3
    # Prompts come again next to new ones: in one run with the trainer's weights, in the other with older ones.
    cache, weights = (found[name]["stale weights"] for name in ("cache-9", "stale-3"))
    assert "prefix cache holds keys and values computed with older weights" in cache.sentence
    assert "enable_prefix_caching=False" in cache.fix
    assert "the engine does not sample with the trainer's weights" in weights.sentence
    assert "max_off_policy_threshold" in weights.fix
