"""The evidence on collapse: statistics by hand, runs that are resumable, verdicts from committed data alone."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from tests.support.paths import ROOT

SCRIPTS = ROOT / "scripts" / "evidence"
sys.path.insert(0, str(SCRIPTS))

from collapse import analyse, arms, evidence_tables, figure, late_runs, results, run, start_model  # noqa: E402
from collapse.significance import bootstrap, cliffs_delta, equivalence, holm, page, sign_flip  # noqa: E402

PLAN = SCRIPTS / "collapse" / "PLAN.md"


# Statistics -------------------------------------------------------------------------------------------------


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
    assert 1.5 < low < 3.5 < high < 5.5
    assert cliffs_delta([1, 2], [0, 2]) == pytest.approx((1 - 1 + 1 + 0) / 4)
    assert cliffs_delta([3, 4], [1, 2]) == 1.0
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})


def test_pages_trend() -> None:
    falling = np.tile([5.0, 4.0, 3.0, 2.0, 1.0], (10, 1))
    assert page(falling) == pytest.approx(1 / 10_001)
    assert page(falling[:, ::-1]) == 1.0
    assert page(np.ones((10, 5))) == 1.0


# Runs -------------------------------------------------------------------------------------------------------


def test_every_run_has_one_name_and_seed_1_is_in_none() -> None:
    names = [each.name for each in arms.list_runs()]
    assert len(set(names)) == len(names) == 5 * 8 + 2 * 5 + 9 * 3
    assert not [name for name in names if name.endswith("-1")]
    assert {each.arm.steps for each in arms.list_runs()} == {80, 24}


def test_late_runs_carry_the_fault_and_nothing_else_differs_from_those_in_step() -> None:
    by_name = {arm.name: arm for arm in arms.ARMS}
    command, environment = run.build_command(arms.Run(by_name["late"], 3))
    assert environment["OFFPOLICY_INJECT"] == "lag:8"
    assert command[-1] == "data.seed=3"
    assert command[-2] == f"actor_rollout_ref.model.path='{start_model.FOLDER}'"
    assert set(run.build_command(arms.Run(by_name["in_step"], 3))[1]) == {"VENV"}
    beside = set(by_name["late"].overrides) ^ set(by_name["in_step"].overrides)
    assert beside == {"offpolicy.alarms.mismatch_growth.action=off"}
    assert set(by_name["late_opsm"].overrides) - set(by_name["late"].overrides) == {
        "correction=opsm",
        "correction.masks.opsm.delta=0.1",
    }


def test_the_list_names_each_run_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(list(arms.list_runs())) + 1
    assert "hours on two idle cores" in printed[-1]
    with pytest.raises(SystemExit, match="late_opsn: unknown"):
        run.main(["late_opsn"])


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Results and logs beside the real ones."""
    path = tmp_path / "results.parquet"
    monkeypatch.setattr(run, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(results, "DATA", path)
    monkeypatch.setattr(results, "MACHINE_FAILURES", tmp_path / "machine_failures.csv")
    return path


EXACT, GRADED = results.COLUMNS["exact"][0], results.COLUMNS["graded"][0]


def quickstart(monkeypatch: pytest.MonkeyPatch, folder: Path, steps: int, code: int = 0) -> None:
    """A quickstart that logs as many steps and ends with a code."""
    folder.mkdir()
    lines = [{"step": 0, "data": {EXACT: 0.1, GRADED: 0.4}}]
    lines += [{"step": step, "data": {"actor/grad_norm": 1.0, "offpolicy/kl/k3": 0.5}} for step in range(1, steps + 1)]
    lines[-1]["data"] |= {EXACT: 0.7}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    script = f"echo everything goes to {folder}; exit {code}"
    monkeypatch.setattr(run, "build_command", lambda each: (["bash", "-c", script], {}))


def test_a_finished_run_is_kept_and_not_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart(monkeypatch, tmp_path / "run", 80)
    run.main(["late-2"])
    assert "late-2: finished, 80 steps" in capsys.readouterr().out
    table = results.read()
    assert set(table["verl"]) == {run.describe_code()["verl"]}
    assert (len(table), set(table["outcome"]), table["exact"].count()) == (81, {"finished"}, 2)
    run.main(["late-2"])
    assert capsys.readouterr().out == ""
    run.main(["late-2", "--list"])
    assert "finished" in capsys.readouterr().out


def test_a_run_that_dies_counts_and_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: Path) -> None:
    quickstart(monkeypatch, tmp_path / "run", 30, code=1)
    run.main(["late-2"])
    table = results.read()
    assert set(table["outcome"]) == {"ended with 1"}
    assert analyse.outcomes(table, "late").loc[2, "outcome"] == 0.0


def test_a_run_that_logged_nothing_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: Path) -> None:
    monkeypatch.setattr(run, "build_command", lambda each: (["bash", "-c", "exit 1"], {}))
    run.main(["late-2"])
    assert not away.exists()


def test_a_run_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: Path) -> None:
    monkeypatch.setattr(run, "build_command", lambda each: (["bash", "-c", "sleep 60"], {}))
    monkeypatch.setattr(run, "LIMIT", 0.001)
    assert "time limit" in run.make(next(iter(arms.list_runs())))


def test_a_run_that_the_machine_ended_is_listed_and_made_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: Path
) -> None:
    """Short of memory twice, the second time it counts."""
    quickstart(monkeypatch, tmp_path / "run", 30, code=1)
    (tmp_path / "run" / "train.log").write_text(f"(raylet) 4 Workers {run.SHORT_OF_MEMORY}, 0 crashed\n")
    run.main(["late-2"])
    noted = pandas.read_csv(tmp_path / "machine_failures.csv")
    assert noted[["arm", "seed", "outcome", "steps"]].values.tolist() == [["late", 2, "out of memory", 30]]
    assert not away.exists()
    run.main(["late-2"])
    assert set(results.read()["outcome"]) == {"out of memory"}
    assert analyse.outcomes(results.read(), "late").loc[2, "outcome"] == 0.0
    assert len(pandas.read_csv(tmp_path / "machine_failures.csv")) == 1


def test_a_run_ends_with_the_command_that_is_terminated(tmp_path: Path) -> None:
    """Nothing is kept of it, so that it is made again."""
    program = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "from pathlib import Path; from collapse import results, run\n"
        f"results.DATA, run.LOGS = Path({str(tmp_path / 'results.parquet')!r}), Path({str(tmp_path / 'logs')!r})\n"
        "run.build_command = lambda each: (['bash', '-c', 'echo $$; exec sleep 60'], {})\n"
        "run.unwind_when_terminated(); run.main(['late-2'])\n"
    )
    log = tmp_path / "logs" / "late-2.log"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not (log.exists() and log.read_text().strip()):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)
    assert not (tmp_path / "results.parquet").exists()


def test_time_that_does_not_suffice_for_a_run_begins_none(
    monkeypatch: pytest.MonkeyPatch, away: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "make", lambda each: pytest.fail("began"))
    run.main(["--hours", "0.01"])
    assert capsys.readouterr().out == ""


def test_every_run_starts_from_the_committed_weights(tmp_path: Path) -> None:
    """A folder as the quickstart makes it, and these in it."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = start_model.find_start_model(tmp_path / "model")
    model, weights = AutoModelForCausalLM.from_pretrained(folder), load_file(start_model.WEIGHTS)
    loaded = model.state_dict()
    assert set(weights) <= set(loaded)
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    assert max(AutoTokenizer.from_pretrained(folder).encode("Spell this word")) < model.config.vocab_size


@pytest.mark.parametrize("path", [results.DATA, results.IN_PROCESS, results.OTHER_START], ids=lambda path: path.stem)
def test_runs_that_are_compared_started_from_the_same_weights(path: Path) -> None:
    """By their exact matches before training, which a warm start on another processor does not share."""
    table = results.read(path)
    assert table.loc[table["step"] == 0, "exact"].nunique() == 1


# Verdicts ---------------------------------------------------------------------------------------------------


def build_table(outcome: Callable[[str, int], float]) -> pandas.DataFrame:
    """All runs of H1 to H4: 0.1 before training and ``outcome`` behind the last step."""
    rows: list[dict[str, Any]] = []
    for each in arms.list_runs():
        card = {"arm": each.arm.name, "seed": each.seed, "outcome": "finished"}
        measured = {"kept": 1.0, "weight_min": 1.0, "weight_max": 1.0, "gradient_error": 1e-7, "proved": 1.0}
        rows += results.build_rows(card, [(0, {EXACT: 0.1})])
        rows += results.build_rows(card, [(each.arm.steps, {EXACT: outcome(each.arm.name, each.seed)})])
        rows[-1] |= measured
    return pandas.DataFrame(rows)


AS_EXPECTED = {"in_step": 0.8, "late": 0.0, "late_opsm": 0.7, "control": 0.5, "control_both": 0.5}


def verdicts(table: pandas.DataFrame) -> dict[str, bool]:
    return {verdict.name: verdict.holds for verdict in analyse.judge(table)}


def test_what_the_plan_expects_holds() -> None:
    found = analyse.judge(build_table(lambda arm, seed: AS_EXPECTED.get(arm, 0.0)))
    assert {verdict.name: verdict.holds for verdict in found} == dict.fromkeys(("H1", "H2", "H3", "H4"), True)
    assert found[0].p == found[2].p == 2 / 256
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


def test_a_missing_seed_is_an_error() -> None:
    table = build_table(lambda arm, seed: AS_EXPECTED.get(arm, 0.0))
    with pytest.raises(analyse.MissingRunsError, match="late_opsm: seeds 4 have not been run"):
        analyse.judge(table[(table["arm"] != "late_opsm") | (table["seed"] != 4)])


def test_the_table_shows_every_arm_that_was_run() -> None:
    table = build_table(lambda arm, seed: AS_EXPECTED.get(arm, 0.0))
    table["staleness"] = 1.0
    found = analyse.describe(table).set_index("arm")
    assert len(found) == len(arms.ARMS)
    assert found.loc["late_opsm", "exact"] == 0.7
    assert found.loc["async_bypass_8", "off eta"]
    assert not found.loc["in_step", "off eta"]


def test_without_results_the_command_says_how_to_make_some(away: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyse.main([]) == 1
    assert "run.py" in capsys.readouterr().out


def build_late_table(outcome: Callable[[str, int, int], float]) -> pandas.DataFrame:
    """All runs in one process, with an outcome by arm, eta and seed."""
    rows: list[dict[str, Any]] = []
    for each in late_runs.list_late_runs():
        card = {"arm": each.setting, "seed": each.seed, "outcome": "finished"}
        rows += results.build_rows(card, [(0, {EXACT: 0.26}), (80, {EXACT: outcome(each.arm, each.eta, each.seed)})])
    return pandas.DataFrame(rows)


def test_a_trend_over_staleness_and_the_arm_that_drops_at_random() -> None:
    """All arms fall but opsm, and opsm is 0.1 above what drops as many rows at random."""

    def outcome(arm: str, eta: int, seed: int) -> float:
        return {"opsm": 0.6, "random": 0.5}.get(arm, 0.7 - eta / 16)

    found = {verdict.name: verdict for verdict in analyse.judge_in_process(build_late_table(outcome))}
    assert found["H5 none 0.001"].holds
    assert not found["H5 opsm 0.001"].holds
    assert found["H5 random 0.001"].holds
    assert "+0.100 [+0.100, +0.100] from random; p = 0.0020" in found["H5 random 0.0003"].found
    alike = build_late_table(lambda arm, eta, seed: 0.5 + 0.01 * (seed % 2) * (arm == "opsm") - 0.005 * (arm == "opsm"))
    assert not {verdict.name: verdict.holds for verdict in analyse.judge_in_process(alike)}["H5 random 0.001"]
    with pytest.raises(analyse.MissingRunsError, match=r"none-8-0\.001: seeds 11 have not been run"):
        analyse.judge_in_process(alike[(alike["arm"] != "none-8-0.001") | (alike["seed"] != 11)])


def test_the_figure_shows_what_was_run_and_says_what_was_not(tmp_path: Path) -> None:
    table = build_late_table(lambda arm, eta, seed: 0.7 - eta / 16)
    figure.draw(build_table(lambda arm, seed: 0.5), table, tmp_path / "whole.png")
    nothing = results.read(tmp_path / "none.parquet")
    figure.draw(nothing, nothing, tmp_path / "empty.png")
    whole, empty = ((tmp_path / f"{name}.png").stat().st_size for name in ("whole", "empty"))
    assert whole > 1.2 * empty > 0
    assert "seeds" in analyse.describe_in_process(table).to_string()


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


# In process -------------------------------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, which sets this process's environment for verl on a CPU."""
    monkeypatch.setattr("os.environ", dict(os.environ))
    return importlib.import_module("collapse.in_process")


def test_as_many_negative_rows_are_dropped_as_opsm_drops(in_process: ModuleType) -> None:
    """Of six rows four are negative; OPSM drops the first two, and a token of the last alone."""
    mask = torch.tensor([[1, 1, 0]] * 6).bool()
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0])[:, None].expand(6, 3)
    factor = torch.ones(6, 3)
    factor[:2, :2] = 0.0
    factor[5, 0] = 0.0
    counts = torch.zeros(6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        found = in_process.shuffle_rejected(factor, advantages, mask, generator)
        dropped = (found == 0).all(-1)
        assert int(dropped.sum()) == 2
        assert set(found[~dropped].flatten().tolist()) == {1.0}
        counts += dropped
    assert counts[4:].tolist() == [0, 0]
    assert counts[:4].min() > 70  # of 100 expected


def test_in_process_runs_differ_in_arm_eta_rate_and_seed(
    in_process: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(results, "IN_PROCESS", tmp_path / "none.parquet")
    runs = list(late_runs.list_late_runs())
    assert len({run.name for run in runs}) == len(runs) == 10 * (2 * (5 * 6 - 1) + 4)
    assert {run.seed for run in runs} == set(range(2, 12))
    assert in_process.main(["opsm", "--list"]) == 0
    assert "110 of 110 left" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(SystemExit, match="opsn: unknown"):
        in_process.main(["opsn"])


def test_log_mu_is_that_of_the_sampled_tokens(in_process: ModuleType) -> None:
    """Prompts of different lengths, padded on the left; an answer ends with its end of sequence."""
    from scripts.quickstart.model import build_model, build_tokenizer

    tokenizer = build_tokenizer("Spell this word backward: ")
    tokenizer.padding_side = "left"
    model = build_model(tokenizer, spread=0.2).eval()
    torch.manual_seed(0)
    prompts = [[10, 11, 12], [13, 14, 15, 16, 17]] * 8
    answers, log_mu = in_process.sample(model, tokenizer, prompts, greedy=False)
    assert {len(answer) for answer in answers} <= set(range(1, in_process.MAX_TOKENS + 1))
    for prompt, answer, found in zip(prompts, answers, log_mu, strict=True):
        assert tokenizer.eos_token_id not in answer[:-1].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.tolist()]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


PAGE = ROOT / "docs" / "collapse.md"


@pytest.mark.parametrize("table", evidence_tables.build_tables(), ids=lambda table: table[0].split("|")[1].strip())
def test_the_page_shows_the_committed_outcomes(table: list[str]) -> None:
    assert "\n".join(table) in PAGE.read_text()


@pytest.mark.parametrize(
    ("path", "one", "other"),
    [
        (results.DATA, "late_opsm", "late"),
        (results.DATA, "late_opsm", "in_step"),
        (results.IN_PROCESS, "opsm-8-0.001", "none-8-0.001"),
        (results.IN_PROCESS, "opsm-8-0.001", "random-8-0.001"),
        (results.IN_PROCESS, "random-8-0.001", "none-8-0.001"),
        (results.IN_PROCESS, "decoupled-8-0.001", "none-8-0.001"),
        (results.IN_PROCESS, "both-8-0.001", "opsm-8-0.001"),
        (results.IN_PROCESS, "opsm-0-0.001", "none-0-0.001"),
        (results.IN_PROCESS, "opsm-8-0.001", "opsm-0-0.001"),
        (results.IN_PROCESS, "none-0-0.001-rounded", "none-0-0.001"),
        (results.IN_PROCESS, "decoupled-0-0.001-rounded", "none-0-0.001-rounded"),
        (results.IN_PROCESS, "opsm-0-0.001-rounded", "none-0-0.001-rounded"),
        (results.IN_PROCESS, "both-0-0.001-rounded", "none-0-0.001-rounded"),
        (results.OTHER_START, "opsm-8-0.001", "random-8-0.001"),
        (results.OTHER_START, "opsm-8-0.001", "none-8-0.001"),
        (results.OTHER_START, "random-8-0.001", "none-8-0.001"),
        (results.OTHER_START, "decoupled-8-0.001", "none-8-0.001"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_page_shows_committed_differences(path: Path, one: str, other: str) -> None:
    """A mean difference paired by seed, its interval and its p value, as they are computed from the results."""
    table = results.read(path)
    pair = [analyse.outcomes(table, setting)["outcome"] for setting in (one, other)]
    assert evidence_tables.format_difference(*pair) in " ".join(PAGE.read_text().split())


def test_the_readme_shows_committed_outcomes() -> None:
    """Its two rows: whole runs, and the arms in one process at eta 8."""
    text = (ROOT / "README.md").read_text()
    for path, arms_shown in (
        (results.DATA, ("in_step", "late", "late_opsm")),
        (results.IN_PROCESS, [f"{arm}-8-0.001" for arm in ("none", "decoupled", "bypass", "both", "random", "opsm")]),
    ):
        table = results.read(path)
        found = [analyse.outcomes(table, arm)["outcome"] for arm in arms_shown]
        assert f"| {' | '.join(map(evidence_tables.format_spread, found))} |" in text


def test_a_difference_is_paired_by_seed() -> None:
    one, other = pandas.Series({2: 0.5, 3: 0.7, 4: 0.9}), pandas.Series({3: 0.4, 2: 0.2})
    assert evidence_tables.format_difference(one, other) == "+0.300 [+0.300, +0.300], p = 0.5"


def test_tables_show_medians_ranges_and_the_seeds_below_their_start() -> None:
    whole = build_table(lambda arm, seed: AS_EXPECTED.get(arm, 0.0) + 0.01 * (seed - 2))
    rows = {line.split("|")[1].strip(): line for line in evidence_tables.build_whole_table(whole)}
    assert rows["`late`"].startswith("| `late` | 8 of 8 | 0.035 (0.000 to 0.070) | 8 |")
    assert rows["`async_both_2`"].startswith("| `async_both_2` | 3 of 3 | 0.010 (0.000 to 0.020) | 3 |")
    assert evidence_tables.build_verdict_table(whole)[2].startswith("| H1 | holds | late collapsed in 8 of 8 |")
    assert evidence_tables.build_verdict_table(whole[whole["arm"] != "control"]) == []
    late = build_late_table(lambda arm, eta, seed: 0.2 if eta == 8 else 0.6)
    rows = {line.split("|")[1].strip(): line for line in evidence_tables.build_in_process_table(late, 1e-3)}
    assert rows["`none`"] == "| `none` |" + " 0.600 (0.600 to 0.600) |" * 4 + " 0.200 (0.200 to 0.200), 10 below |"
    assert rows["`random`"].startswith("| `random` | – | 0.600")
    assert evidence_tables.build_in_process_table(late[late["seed"] != 5], 1e-3) == []
