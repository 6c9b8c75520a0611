"""The committed results, and what the pages and the figure say of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pandas
import pytest
from collapse import analyse, arms, results

from tests.support.collapse_results import AS_EXPECTED, build_late_table, build_table
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

PLAN = ROOT / "scripts" / "evidence" / "collapse" / "PLAN.md"


PAGE, SUMMARY = ROOT / "docs" / "evidence" / "collapse.md", ROOT / "docs" / "collapse.md"


@pytest.mark.parametrize("path", [results.DATA, results.IN_PROCESS], ids=lambda path: path.stem)
def test_the_plan_came_before_the_data(path: Path) -> None:
    """The commit that brought PLAN.md is an ancestor of the one that brought the data."""

    def first(of: Path) -> str:
        found = subprocess.run(
            ["git", "log", "--diff-filter=A", "--format=%H", "--", str(of)], cwd=ROOT, capture_output=True, text=True
        )
        return found.stdout.split()[-1] if found.returncode == 0 and found.stdout.split() else ""

    if not path.exists() or not (data := first(path)):
        pytest.skip("no committed data")
    plan = first(PLAN)
    assert plan
    assert plan != data
    ancestor = ["git", "merge-base", "--is-ancestor", plan, data]
    assert subprocess.run(ancestor, cwd=ROOT).returncode == 0


@pytest.mark.parametrize("path", [results.DATA, results.IN_PROCESS, results.OTHER_START], ids=lambda path: path.stem)
def test_runs_that_are_compared_started_from_the_same_weights(path: Path) -> None:
    """By their exact matches before training, which a warm start on another processor does not share."""
    table = results.read(path)
    assert table.loc[table["step"] == 0, "exact"].nunique() == 1


@pytest.mark.parametrize(
    "table",
    analyse.build_tables(results.read(), results.read(results.IN_PROCESS)),
    ids=lambda table: table[0].split("|")[1].strip(),
)
def test_the_page_shows_the_committed_outcomes(table: list[str]) -> None:
    assert "\n".join(table) in PAGE.read_text()


def pair(names: str, etas: Sequence[int], rate: str) -> list[tuple[str, str]]:
    """Runs of two arms at each eta."""
    named = [name.split(":") for name in names.split()]
    return [(f"{one}-{eta}-{rate}", f"{other}-{eta}-{rate}") for one, other in named for eta in etas]


PAIRS = {
    results.DATA: [
        *(("late_opsm", "late"), ("late_opsm", "in_step"), ("late_decoupled", "late"), ("late_both", "late_opsm"))
    ],
    results.IN_PROCESS: [
        *pair("opsm:none", arms.ETAS, "0.001"),
        *pair("opsm:random both:opsm decoupled:none", (1, 2, 4, 8), "0.001"),
        *(*pair("bypass:none", (1, 2, 4), "0.001"), *pair("random:none", (8,), "0.001")),
        *pair("decoupled:none opsm:none both:none", (0,), "0.001-rounded"),
        *pair("opsm:none", arms.ETAS, "0.0003"),
        *pair("random:none opsm:random", (1, 2, 4, 8), "0.0003"),
        *(*pair("decoupled:none bypass:none", (4, 8), "0.0003"), *pair("both:opsm", (2, 8), "0.0003")),
        *((f"none-{eta}-0.001", "none-0-0.001") for eta in (1, 2)),
        *((f"none-{eta}-0.0003", "none-0-0.0003") for eta in (1, 2, 4, 8)),
        *((f"opsm-8-{rate}", f"opsm-0-{rate}") for rate in ("0.001", "0.0003")),
        ("none-0-0.001-rounded", "none-0-0.001"),
    ],
    results.OTHER_START: pair("opsm:random opsm:none random:none decoupled:none", (8,), "0.001"),
}


@pytest.mark.parametrize(
    ("path", "one", "other"), [(path, *names) for path, pairs in PAIRS.items() for names in pairs], ids=str
)
def test_the_page_shows_committed_differences(path: Path, one: str, other: str) -> None:
    """A mean difference paired by seed, its interval and its p value, as they are computed from the results."""
    table = results.read(path)
    ends = [analyse.outcomes(table, setting)["outcome"] for setting in (one, other)]
    assert analyse.format_difference(*ends) in " ".join(PAGE.read_text().split())


@pytest.mark.parametrize("eta", [2, 8])
@pytest.mark.parametrize("arm", ["bypass", "decoupled", "both"])
def test_the_page_lists_the_seeds_of_asynchronous_runs(arm: str, eta: int) -> None:
    found = analyse.outcomes(results.read(), f"async_{arm}_{eta}")["outcome"]
    listed = ", ".join(f"{value:.3f}" for value in found)
    assert f"`async_{arm}_{eta}` ({listed})" in " ".join(PAGE.read_text().split())


def test_the_page_says_how_two_runs_of_long_answers_ended() -> None:
    """Graded scores of the two, and the tokens of their answers next to those of the other seeds with nothing stale."""
    table, page = results.read(), " ".join(PAGE.read_text().split())
    last = table[table["step"] == 80].set_index(["arm", "seed"])
    graded, length = last["graded"], last["length"]
    lengths = [length["async_both_0", seed] for seed in (3, 2, 4)]
    of_late = length["async_both_2", 3], graded["async_both_2", 3]
    in_step = "{:.3f} {:.1f} {:.1f} {:.1f}".format(graded["async_both_0", 3], *lengths)
    assert find_numbers(in_step, of="graded score", text=page)
    assert find_numbers("{:.1f} {:.3f}".format(*of_late), of="graded score", text=page)


@pytest.mark.parametrize("arm", ["in_step", "late", "late_decoupled", "late_both", "late_opsm"])
def test_the_summary_shows_committed_outcomes(arm: str) -> None:
    """Median and number of seeds below their start."""
    found = analyse.outcomes(results.read(), arm)
    assert f"| {found['outcome'].median():.3f} | {analyse.count_below(found)} of {len(found)} |" in SUMMARY.read_text()


def find_numbers(numbers: str, of: str, text: str) -> bool:
    """Whether a passage that contains ``of`` gives these numbers, in this order and without others between them."""
    passage = r"\D+?".join(map(re.escape, numbers.split()))
    return any(of in text[max(0, found.start() - 200) : found.end()] for found in re.finditer(passage, text))


def find_start(path: Path) -> str:
    table = results.read(path)
    return f"{table.loc[table['step'] == 0, 'exact'].iloc[0]:.3f}"


def find_below(path: Path, arms: list[str]) -> list[int]:
    table = results.read(path)
    return [analyse.count_below(analyse.outcomes(table, arm)) for arm in arms]


def test_the_summary_says_what_the_results_say() -> None:
    text = " ".join(SUMMARY.read_text().split())
    assert find_start(results.DATA) in text
    whole, late = results.read(), results.read(results.IN_PROCESS)
    lower = [analyse.outcomes(late, f"{arm}-8-0.0003")["outcome"].median() for arm in ("none", "decoupled", "opsm")]
    assert find_numbers("{:.3f} {:.3f} {:.3f}".format(*lower), of="learning rate", text=text)
    pair = [analyse.outcomes(late, f"{arm}-8-0.001")["outcome"].median() for arm in ("random", "opsm")]
    assert find_numbers("{:.3f} {:.3f}".format(*pair), of="random", text=text)
    assert find_below(results.IN_PROCESS, [f"none-{eta}-0.001" for eta in (1, 2, 4)]) == [2, 5, 10]
    *others, control = analyse.judge(whole)
    assert all(verdict.holds for verdict in others)
    assert not control.holds
    assert f"within {find_stray(whole)} of 1" in text
    fails = {
        verdict.name for rate in (1e-3, 3e-4) for verdict in analyse.judge_in_process(late, rate) if not verdict.holds
    }
    assert fails == {"H5 opsm 0.001", "H5 random 0.001", "H5 opsm over random 0.001"}
    assert find_below(results.DATA, ["async_decoupled_8", "async_both_8", "async_both_2"]) == [3, 0, 1]
    rate = [f"{arm}-{eta}-0.0003" for arm in arms.IN_PROCESS for eta in arms.ETAS]
    assert set(find_below(results.IN_PROCESS, rate)) == {0}


def find_stray(whole: pandas.DataFrame) -> str:
    """The largest distance of the control's weights from 1."""
    weights = whole.loc[whole["arm"] == "control_both", ["weight_min", "weight_max"]]
    return f"{(weights - 1).abs().max().max():.1e}".replace("e-05", "e-5")


def test_the_page_says_what_the_results_say() -> None:
    """Numbers in its sentences that are neither in a table nor a paired difference."""
    text, whole = " ".join(PAGE.read_text().split()), results.read()
    assert all(f"{find_start(path)} before training" in text for path in (results.DATA, results.OTHER_START))
    assert f"differs from 1 by {find_stray(whole)}" in text
    one, other = (analyse.outcomes(whole, arm)["outcome"] for arm in ("control_both", "control"))
    assert f"differ by up to {(one - other).abs().max():.2f}" in text
    steps = whole[whole["step"] > 0]
    runs = {
        eta: steps[steps["arm"].isin([f"async_{arm}_{eta}" for arm in ("bypass", "both", "decoupled")])]
        for eta in (2, 8)
    }
    measured = {
        eta: of.groupby(["arm", "seed"])["staleness"].mean().drop(("async_decoupled_8", 2), errors="ignore")
        for eta, of in runs.items()
    }
    spans = [f"{measured[eta].min():.1f} to {measured[eta].max():.1f}" for eta in (8, 2)]
    assert "the sampler is {} steps late at eta 8, {} steps late at eta 2".format(*spans) in text
    assert find_below(results.IN_PROCESS, [f"none-{eta}-0.001" for eta in (1, 2, 4)]) == [2, 5, 10]
    assert find_below(results.OTHER_START, ["none-0-0.001"]) == [4]
    assert find_below(results.IN_PROCESS, ["bypass-8-0.001"]) == [5]


def test_a_difference_is_paired_by_seed() -> None:
    one, other = pandas.Series({2: 0.5, 3: 0.7, 4: 0.9}), pandas.Series({3: 0.4, 2: 0.2})
    assert analyse.format_difference(one, other) == "+0.300 [+0.300, +0.300], p = 0.5"


def test_tables_show_medians_ranges_and_the_seeds_below_their_start() -> None:
    whole = build_table(lambda arm, seed: AS_EXPECTED.get(arm, 0.0) + 0.01 * (seed - 2))
    rows = {line.split("|")[1].strip(): line for line in analyse.build_whole_table(whole)}
    assert rows["`late`"].startswith("| `late` | 8 of 8 | 0.035 (0.000 to 0.070) | 8 |")
    assert rows["`async_both_2`"].startswith("| `async_both_2` | 3 of 3 | 0.010 (0.000 to 0.020) | 3 |")
    verdicts = analyse.build_verdict_table(analyse.judge(whole))
    assert verdicts[2].startswith("| H1 | holds | late collapsed in 8 of 8 |")
    late = build_late_table(lambda arm, eta, seed: 0.2 if eta == 8 else 0.6)
    rows = {line.split("|")[1].strip(): line for line in analyse.build_in_process_table(late, 1e-3)}
    assert rows["`none`"] == "| `none` |" + " 0.600 (0.600 to 0.600) |" * 4 + " 0.200 (0.200 to 0.200), 10 below |"


def test_the_table_marks_runs_off_their_eta() -> None:
    """Staleness is first averaged within a run."""
    table = build_table(lambda arm, seed: 0.5)
    table["staleness"] = 1.0
    rows = {line.split("|")[1].strip(): line for line in analyse.build_whole_table(table)}
    assert rows["`async_bypass_8`"].endswith("| 1.00 (off its eta: seed 2, 3, 4) |")
    assert rows["`in_step`"].endswith("| 1.00 |")


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    table = build_late_table(lambda arm, eta, seed: 0.7 - eta / 16)
    analyse.draw(build_table(lambda arm, seed: 0.5), table, tmp_path / "whole.png")
    assert (tmp_path / "whole.png").read_bytes()[:4] == b"\x89PNG"
