"""The cause finder on recordings of real runs of verl, Ray and vLLM, made by scripts/evidence/injected_faults.

Thresholds were chosen on ``tuning`` alone; ``held_out`` are other runs with other seeds and other strengths of the
faults.
"""

from __future__ import annotations

import sys

import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "evidence"))

from injected_faults.evaluate import Judged, judged


@pytest.fixture(scope="module")
def held_out() -> list[Judged]:
    return judged("held_out")


@pytest.mark.slow
def test_all_cases_not_used_for_tuning_are_right(held_out: list[Judged]) -> None:
    assert {one.case.name: set(one.found) for one in held_out} == {
        one.case.name: set(one.case.causes) for one in held_out
    }
    assert sum(len(one.found) for one in held_out) == 14


@pytest.mark.slow
def test_fixes_name_what_was_injected(held_out: list[Judged]) -> None:
    """Not verdicts alone: temperatures to the second digit, no more mass missing than top-p leaves out, and a cache."""
    found = {one.case.name: {c.name: c for c in one.causes} for one in held_out}
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
