"""Pairs of whole runs: their figures by hand, and commands that stand in for the runs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from scripts.benchmark.paired_runs import PRESETS, Run, build_command, compute_interval, format_result, read_runs
from tests.support.paths import ROOT

pytest.importorskip("verl")

STAND_IN = """
import json, os, sys, time
from pathlib import Path
import scripts.benchmark.paired_runs as paired

RUN = '''
import json, os, sys, time
log, side, pair, steps, hang = os.environ["VERL_FILE_LOGGER_PATH"], *sys.argv[1:]
with open(log, "w") as out:
    out.write(json.dumps({"step": 0, "data": {"val": 1.0}}) + chr(10))
    for step in range(1, int(steps) + 1):
        data = {"actor/grad_norm": 1.0, "timing_s/step": 1.0 + (side == "corrected") + 9 * (step == 1)}
        data["timing_s/gen"] = data["timing_s/step"] / 2
        out.write(json.dumps({"step": step, "data": data}) + chr(10))
if hang == f"{pair}{side}":
    time.sleep(60)
'''

def build_command(side, preset, pair, scratch, overrides, against):
    steps = next(one.partition("=")[2] for one in overrides if one.startswith("trainer.total_training_steps="))
    return [sys.executable, "-c", RUN, side, str(pair), steps, os.environ.get("HANG", "")]

paired.build_command, paired.prepare = build_command, lambda preset: []
sys.exit(paired.main(sys.argv[1:]))
"""


def run_pairs(out: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own: it ends all that is below it."""
    code, path = textwrap.dedent(STAND_IN), os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code, "--out", str(out), *arguments]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path} | env, capture_output=True, text=True)


def ended(pair: int, side: str, start: float, *seconds: float) -> Run:
    return Run(["forward", 3, []], pair, side, start, [99.0, *seconds], {})


def test_an_interval_by_hand() -> None:
    """Of 1, 2 and 6: mean 3, standard deviation sqrt(7), t of 2 degrees of freedom 4.303."""
    half = 4.303 * math.sqrt(7.0) / math.sqrt(3.0)
    assert compute_interval([1.0, 2.0, 6.0]) == pytest.approx((3.0, 3.0 - half, 3.0 + half))
    mean, low, _ = compute_interval([4.0])
    assert mean == 4.0
    assert math.isnan(low)
    mean, _, high = compute_interval([0.0, 2.0] * 50)
    assert high - mean == pytest.approx(2.086 * math.sqrt(100 / 99) / 10)


def test_pairs_are_compared_by_hand() -> None:
    """Ratios 1/2 and 2, whose geometric mean is 1; starts 4 and 2 s apart; first steps do not count."""
    runs = [
        ended(1, "verl", 30.0, 2.0, 2.0),
        ended(1, "corrected", 34.0, 1.0, 1.0),
        ended(2, "corrected", 32.0, 4.0, 2.0, 9.0),
        ended(2, "verl", 30.0, 2.0, 2.0),
    ]
    first, _, *rows, ratio, start = format_result(runs).splitlines()
    assert first.startswith("| pair |")
    assert rows == ["| 1 | 2.000 | 1.000 | 0.500 | 30.0 | 34.0 |", "| 2 | 2.000 | 4.000 | 2.000 | 30.0 | 32.0 |"]
    # Two logs, +-log 2: a standard error of log 2, and 12.706 of them.
    assert ratio.endswith(f": 1.000 (0.000 to {2**12.706:.3f})")
    assert start.endswith(": +3.0 s (-9.7 to +15.7)")


def test_phases_are_compared_by_hand() -> None:
    """A phase that one side lacks counts as 0 s; one below a hundredth of a step on both is not shown."""
    runs = [
        Run([], pair, side, 30.0, [9.0, 2.0, 2.0], {"gen": gen, "reward": 0.001} | more)
        for pair in (1, 2)
        for side, gen, more in [("verl", 1.0, {"old_log_prob": 0.5}), ("corrected", 1.25, {"issue": 0.5})]
    ]
    assert format_result(runs).splitlines()[-3:] == [
        "gen: verl's 1.000 s, corrected +0.250 s (+0.250 to +0.250)",
        "issue: verl's 0.000 s, corrected +0.500 s (+0.500 to +0.500)",
        "old_log_prob: verl's 0.500 s, corrected -0.500 s (-0.500 to -0.500)",
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_both_runs_differ_by_the_program_and_the_correction(preset: str, tmp_path: Path) -> None:
    verls, ours = (
        build_command(side, PRESETS[preset], 7, tmp_path, ["data.truncation=left"]) for side in ("verl", "corrected")
    )
    assert "verl.trainer.main_ppo" in verls
    assert not any("offpolicy" in word or word.startswith("correction") for word in verls[3:] if str(ROOT) not in word)
    assert "recipe.offpolicy.main_offpolicy" in ours
    only_verls, only_ours = set(verls) - set(ours), set(ours) - set(verls)
    assert only_verls == {"verl.trainer.main_ppo", "--config-path", str(ROOT / "configs")}
    assert only_ours == {"recipe.offpolicy.main_offpolicy", *PRESETS[preset].corrected}
    assert {"data.seed=7", "actor_rollout_ref.rollout.seed=7"} < set(verls)
    assert ours[-1] == "data.truncation=left"


@pytest.mark.parametrize("preset", PRESETS)
def test_batches_of_a_preset_divide_into_micro_batches(preset: str) -> None:
    """As verl asks of them."""
    quickstart = OmegaConf.load(ROOT / "configs" / "quickstart.yaml")
    keys = OmegaConf.merge(quickstart, OmegaConf.from_dotlist(list(PRESETS[preset].both)))
    model = keys.actor_rollout_ref
    assert keys.data.train_batch_size * model.rollout.n % model.rollout.log_prob_micro_batch_size_per_gpu == 0
    assert model.actor.ppo_mini_batch_size * model.rollout.n % model.actor.ppo_micro_batch_size_per_gpu == 0


@pytest.mark.slow
def test_pairs_go_on_where_a_call_was_ended(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    hung = run_pairs(out, "--pairs", "2", "--steps", "3", "--limit", "2", HANG="2corrected")
    assert hung.returncode == 1
    assert "took longer than 2 s" in hung.stderr
    settings = ["forward", 3, []]
    assert [(run.pair, run.side) for run in read_runs(out, settings)] == [(1, "verl"), (1, "corrected")]
    assert read_runs(out, ["forward", 4, []]) == []

    done = run_pairs(out, "--pairs", "2", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["pair 2 of 2, corrected", "pair 2 of 2, verl"]
    assert [run.seconds for run in read_runs(out, settings)] == [[s + 9, s, s] for s in (1.0, 2.0, 2.0, 1.0)]
    assert "step, corrected over verl's own: 2.000 (2.000 to 2.000)" in done.stdout
    assert done.stdout.splitlines()[-1] == "gen: verl's 0.500 s, corrected +0.500 s (+0.500 to +0.500)"
    assert len(out.read_text().splitlines()) == 4

    again = run_pairs(out, "--pairs", "2", "--steps", "3")
    assert (again.returncode, again.stderr, again.stdout) == (0, "", done.stdout)


@pytest.mark.slow
def test_a_run_that_fails_stops_the_call(tmp_path: Path) -> None:
    script = textwrap.dedent(STAND_IN).replace('json.dumps({"step": 0', 'json.dump({"step": 0')
    command = [sys.executable, "-c", script, "--out", str(tmp_path / "pairs.jsonl")]
    failed = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "ended with 1" in failed.stderr
    assert "TypeError" in failed.stderr
    assert not (tmp_path / "pairs.jsonl").exists()
