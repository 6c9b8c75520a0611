"""Extensions in verl's asynchronous programs on a CPU are proved live, and equal their definition if its inputs are
recorded.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.recording.recording import Recording
from scripts.quickstart.options import SUMS_OVERRIDES
from scripts.quickstart.prepare import folder
from scripts.quickstart.run import CACHE
from tests.integration.test_programs import PROGRAMS, launch, read_steps
from tests.integration.test_turn_credit import CREDIT, TOOLS, count_right_advantages, standardise
from tests.support.paths import ROOT

pytestmark = [pytest.mark.verl(">=0.9.1"), pytest.mark.slow, pytest.mark.extended]

Run = Callable[..., list[dict[str, float]]]


@pytest.fixture
def run(run_program: Callable[..., Any], made: dict[str, Path], tmp_path: Path) -> Run:
    """A function that runs a program with overrides to its end, and returns the metrics of each step."""

    def run(name: str, *overrides: str, **environment: str) -> list[dict[str, float]]:
        program = replace(PROGRAMS[name], overrides=(*PROGRAMS[name].overrides, *overrides))
        finished = launch(run_program, made, program, tmp_path, **environment)
        assert finished.returncode == 0, finished.output[-3000:]
        steps = read_steps(finished.output)
        assert steps[-1]["offpolicy/live/proved"] == 1.0
        return steps

    return run


@pytest.mark.parametrize("name", ["fully_async", "one_step_off"])
def test_turns_are_credited(name: str, run: Run, tmp_path: Path) -> None:
    *_, last = run(
        name,
        *TOOLS,
        "actor_rollout_ref.rollout.multi_turn.enable=true",  # without it fully_async_policy runs single_turn_agent
        "+turn_credit@turn_credit=turn_index",
        *CREDIT,
        f"offpolicy.record.dir={tmp_path / 'record'}",
        OFFPOLICY_TURNS=str(tmp_path),
        VERL_USE_EXTERNAL_MODULES="tests.support.tool_turns",
    )
    assert last["offpolicy/live/turn_credit"] == 1.0
    assert count_right_advantages(tmp_path / "record") > 300


def test_baseline_and_learning_rate_act(run: Run) -> None:
    keys = ("+optimal_baseline@optimal_baseline=leave_one_out", "+ess_lr@ess_lr=sqrt")
    *_, last = run("fully_async", *keys)
    assert last["offpolicy/live/optimal_baseline"] == last["offpolicy/live/ess_lr"] == 1.0


def test_anchors_of_a_length_penalty_are_resumed(run: Run, tmp_path: Path) -> None:
    """fully_async_policy loads a checkpoint through its trainer's class, so a hook on the instance would not see it."""
    anchor = ("length_penalty.anchor.pass_rate=0.01", "length_penalty.anchor.min_samples=1")
    saved = (f"trainer.default_local_dir={tmp_path / 'checkpoints'}", "trainer.save_freq=1")
    keys = ("+length_penalty@length_penalty=anchor", *anchor, *saved)
    *_, begun = run("fully_async", *keys)
    assert begun["offpolicy/live/length_penalty"] == 1.0
    assert begun["length/anchor/frozen"] > 0
    first, *_ = run("fully_async", *keys, "trainer.resume_mode=auto", "rollout.total_rollout_steps=128")
    assert first["training/global_step"] > begun["training/global_step"]
    assert first["length/anchor/frozen"] >= begun["length/anchor/frozen"] > first["length/anchor/new"]


def test_steps_are_credited(run: Run, tmp_path: Path) -> None:
    """verl's advantage of the outcome plus, from each token on, the utilities standardised over the group's
    episodes.
    """
    command = [sys.executable, "-m", "scripts.quickstart.prepare", "--cache", str(CACHE), "sums", "sums_model"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    *_, last = run(
        "one_step_off",
        "+process_reward@process_reward=prefix_value",
        f"actor_rollout_ref.model.path={folder(CACHE, 'sums_model')}",
        f"data.train_files={folder(CACHE, 'sums') / 'train.parquet'}",
        f"data.val_files={folder(CACHE, 'sums') / 'heldout.parquet'}",
        *SUMS_OVERRIDES[:3],
        f"offpolicy.record.dir={tmp_path / 'record'}",
    )
    assert last["offpolicy/live/process_reward"] == 1.0
    assert last["process_reward/live/compared_prefixes"] > 0
    checked = 0
    for recorded in Recording(tmp_path / "record"):
        rows, groups = recorded.rows, defaultdict(list)
        none = np.full(rows.tokens, math.nan)
        utilities = rows.extensions.get("offpolicy_process_utility", none)
        for row in range(len(rows)):
            at = slice(*rows.offsets[row : row + 2])
            groups[rows.uid[row]].append((float(rows.reward[row]), rows.advantages[at], utilities[at]))
        for group in groups.values():
            outcomes = standardise([reward for reward, *_ in group])
            flat = [float(each) for *_, values in group for each in values[~np.isnan(values)]]
            credits = iter(standardise(flat))
            for outcome, (_, dealt, values) in zip(outcomes, group, strict=True):
                own = np.array([0.0 if math.isnan(each) else next(credits) for each in values])
                np.testing.assert_allclose(dealt, outcome + own[::-1].cumsum()[::-1], atol=1e-3)
                checked += len(dealt)
    assert checked > 1000
