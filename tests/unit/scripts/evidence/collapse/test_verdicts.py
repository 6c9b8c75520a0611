"""Verdicts on the hypotheses, from results alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest
from collapse import analyse
from collapse.arms import RATES
from seeds import bootstrap, cliffs_delta, equivalence, holm, page, sign_flip

from tests.support.collapse_results import AS_EXPECTED, build_late_table, build_table


def verdicts(table: pandas.DataFrame) -> dict[str, bool]:
    return {verdict.name: verdict.holds for verdict in analyse.judge(table)}


def test_what_the_plan_expects_holds() -> None:
    found = analyse.judge(build_table(lambda arm, seed: AS_EXPECTED.get(arm, 0.0)))
    assert {verdict.name: verdict.holds for verdict in found} == dict.fromkeys(("H1", "H2", "H3", "H4"), True)
    assert "0.0234 by Holm" in found[2].found  # three of equal rank would be 3 x 2/256


def test_each_hypothesis_can_fail() -> None:
    def change(**changed: float) -> dict[str, bool]:
        return verdicts(build_table(lambda arm, seed: (AS_EXPECTED | changed).get(arm, 0.0)))

    assert not change(late=0.2)["H1"]
    assert not change(late_opsm=0.5)["H2"]  # 0.6 would be three quarters
    assert not change(late_opsm=0.0)["H3"]
    assert not change(control_both=0.6)["H4"]
    table = build_table(lambda arm, seed: AS_EXPECTED.get(arm, 0.0))
    for column, value, said in (
        ("kept", 0.99, "kept 0.990"),
        ("weight_max", 1.00002, "within 2.0e-05 of 1 (allowed 1e-05)"),
        ("gradient_error", 1e-5, "gradient error 1.0e-05"),
    ):
        changed_table = table.copy()
        changed_table.loc[changed_table["arm"] == "control_both", column] = value
        *_, h4 = analyse.judge(changed_table)
        assert not h4.holds
        assert said in h4.found


@pytest.mark.slow
def test_without_results_the_command_says_how_to_make_some(away: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyse.main([]) == 1
    assert "run.py" in capsys.readouterr().out


@pytest.mark.slow
def test_a_trend_over_staleness_and_the_arm_that_drops_at_random() -> None:
    """All arms fall but opsm, and opsm is 0.1 above what drops as many rows at random."""

    def outcome(arm: str, eta: int, seed: int) -> float:
        return {"opsm": 0.6, "random": 0.5}.get(arm, 0.7 - eta / 16)

    table = build_late_table(outcome)
    found = {verdict.name: verdict for rate in RATES for verdict in analyse.judge_in_process(table, rate)}
    assert found["H5 none 0.001"].holds
    assert not found["H5 opsm 0.001"].holds
    assert not found["H5 random 0.001"].holds
    assert found["H5 opsm over random 0.001"].holds
    said = "+0.100 [+0.100, +0.100] from random at eta 8, Cliff's delta +1.00; p = 0.0020"
    assert said in found["H5 opsm over random 0.0003"].found
    alike = build_late_table(lambda arm, eta, seed: 0.5 + 0.01 * (seed % 2) * (arm == "opsm") - 0.005 * (arm == "opsm"))
    holds = {verdict.name: verdict.holds for verdict in analyse.judge_in_process(alike, 1e-3)}
    assert not holds["H5 opsm over random 0.001"]


def test_eight_equal_differences_are_as_significant_as_eight_can_be() -> None:
    assert sign_flip([0.1] * 8) == 2 / 256
    assert sign_flip([0.1] * 8, two_sided=False) == 1 / 256
    assert sign_flip([0.3] * 5) == 2 / 32


def test_sign_flips_by_hand() -> None:
    """Of the patterns of (3, 1, -1): sums 3, 1, 5, 3, and the same below 0; six of eight are at least 3 off 0."""
    assert sign_flip([3.0, 1.0, -1.0]) == 6 / 8
    assert sign_flip([3.0, 1.0, -1.0], two_sided=False) == 3 / 8
    assert sign_flip([0.0, 0.0]) == 1.0


def test_equivalence_needs_both_sides() -> None:
    assert equivalence([0.0] * 5, 0.05) == 1 / 32
    assert equivalence([0.06] * 5, 0.05) == 1.0
    assert equivalence([-0.06] * 5, 0.05) == 1.0


def test_intervals_effects_and_adjusted_p_values_by_hand() -> None:
    assert bootstrap([0.2] * 8) == pytest.approx((0.2, 0.2))
    low, high = bootstrap(np.arange(8.0))
    # The mean of eight draws of 0 to 7 has a standard deviation of sqrt(5.25 / 8), and is nearly normal.
    assert (low, high) == pytest.approx((3.5 - 1.96 * (5.25 / 8) ** 0.5, 3.5 + 1.96 * (5.25 / 8) ** 0.5), abs=0.1)
    assert cliffs_delta([1, 2], [0, 2]) == pytest.approx((1 - 1 + 1 + 0) / 4)
    assert cliffs_delta([3, 4], [1, 2]) == 1.0
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})


def test_pages_trend() -> None:
    falling = np.tile([5.0, 4.0, 3.0, 2.0, 1.0], (10, 1))
    assert page(falling) == pytest.approx(1 / 10_001)
    assert page(falling[:, ::-1]) == 1.0
    assert page(np.ones((10, 5))) == 1.0
