"""Extensions in verl's asynchronous programs on a CPU: proved, and equal to their definition where it is recorded."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.recording.recording import Recording
from scripts.quickstart.options import SUMS_OVERRIDES
from scripts.quickstart.prepare import folder
from scripts.quickstart.processes import Teacher
from scripts.quickstart.run import CACHE
from tests.integration.test_programs import PROGRAMS, launch, read_steps
from tests.integration.test_turn_credit import CREDIT, TOOLS, count_right_advantages, standardise
from tests.support.paths import ROOT

pytestmark = [pytest.mark.verl(">=0.9.1"), pytest.mark.slow, pytest.mark.extended]

asynchronous = pytest.mark.parametrize("name", ["fully_async", "one_step_off"])


def run(
    launching: tuple[Callable[..., Any], dict[str, Path], Path], name: str, *overrides: str, **environment: str
) -> tuple[str, dict[str, float]]:
    """Run a program with these overrides; return its output and the metrics of its last step."""
    run_program, made, work = launching
    program = replace(PROGRAMS[name], overrides=(*PROGRAMS[name].overrides, *overrides))
    finished = launch(run_program, made, program, work, **environment)
    assert finished.returncode == 0, finished.output[-3000:]
    last = read_steps(finished.output)[-1]
    assert last["offpolicy/live/proved"] == 1.0
    return finished.output, last


@pytest.fixture
def launching(
    run_program: Callable[..., Any], made: dict[str, Path], tmp_path: Path
) -> tuple[Callable[..., Any], dict[str, Path], Path]:
    return run_program, made, tmp_path


def prepare(*parts: str) -> Path:
    """Make parts of the quickstart's cache; return the folder of the last one."""
    command = [sys.executable, "-m", "scripts.quickstart.prepare", "--cache", str(CACHE), *parts]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    return folder(CACHE, parts[-1])


def read_groups(directory: Path) -> Iterator[list[tuple[float, Any, Any]]]:
    """The (reward, advantages, utilities) of each row of every recorded group."""
    for recorded in Recording(directory):
        groups: dict[str, list[tuple[float, Any, Any]]] = defaultdict(list)
        rows, none = recorded.rows, np.full(recorded.rows.tokens, math.nan)
        utilities = rows.extensions.get("offpolicy_process_utility", none)
        for row in range(len(rows)):
            at = slice(*rows.offsets[row : row + 2])
            groups[rows.uid[row]].append((float(rows.reward[row]), rows.advantages[at], utilities[at]))
        yield from groups.values()


@asynchronous
def test_turns_are_credited(name: str, launching: Any, tmp_path: Path) -> None:
    output, last = run(
        launching,
        name,
        *TOOLS,
        "actor_rollout_ref.rollout.multi_turn.enable=true",  # without it fully_async_policy runs single_turn_agent
        "+turn_credit@turn_credit=turn_index",
        *CREDIT,
        f"offpolicy.record.dir={tmp_path / 'record'}",
        OFFPOLICY_TURNS=str(tmp_path),
        VERL_USE_EXTERNAL_MODULES="tests.support.tool_turns",
    )
    assert "turn-level credit LIVE on" in output
    assert last["offpolicy/live/turn_credit"] == 1.0
    assert count_right_advantages(tmp_path / "record") > 300


@asynchronous
def test_baseline_and_learning_rate_act(name: str, launching: Any) -> None:
    _, last = run(launching, name, "+optimal_baseline@optimal_baseline=leave_one_out", "+ess_lr@ess_lr=sqrt")
    assert last["offpolicy/live/optimal_baseline"] == last["offpolicy/live/ess_lr"] == 1.0


@asynchronous
def test_a_teacher_that_demands_a_key_is_asked(name: str, launching: Any, tmp_path: Path) -> None:
    key = "of-this-test-alone"
    environment = {**os.environ, "PLATFORM": "cpu", "VENV": sys.prefix, "VLLM_API_KEY": key}
    teacher = Teacher(prepare("teacher"), environment, tmp_path / "teacher.log", ROOT)
    try:
        teacher.wait(lambda: None)
        keys = (f"opd.teacher.url={teacher.url}", "opd.teacher.api_key=TEACHER_KEY", "opd.eligible.passed_above=0.99")
        output, last = run(launching, name, "+opd@opd=advantage", *keys, TEACHER_KEY=key)
    finally:
        teacher.child.process.terminate()
        teacher.child.process.wait(60)
    assert last["offpolicy/live/opd"] == 1.0
    assert last["opd/frac_opd_samples"] > 0
    assert key not in output


@asynchronous
def test_lengths_are_penalised(name: str, launching: Any) -> None:
    _, last = run(launching, name, "+length_penalty@length_penalty=group")
    assert last["offpolicy/live/length_penalty"] == 1.0


def test_anchors_of_a_length_penalty_are_resumed(launching: Any, tmp_path: Path) -> None:
    """fully_async_policy loads a checkpoint through its trainer's class, which no hook on the instance sees."""
    anchor = ("length_penalty.anchor.pass_rate=0.01", "length_penalty.anchor.min_samples=1")
    saved = (f"trainer.default_local_dir={tmp_path / 'checkpoints'}", "trainer.save_freq=1")
    keys = ("+length_penalty@length_penalty=anchor", *anchor, *saved)
    _, begun = run(launching, "fully_async", *keys)
    assert begun["length/anchor/frozen"] > 0
    output, _ = run(launching, "fully_async", *keys, "trainer.resume_mode=auto", "rollout.total_rollout_steps=128")
    first = read_steps(output)[0]
    assert first["training/global_step"] > begun["training/global_step"]
    assert first["length/anchor/frozen"] >= begun["length/anchor/frozen"] > first["length/anchor/new"]


def test_pass_at_2_is_trained(launching: Any, tmp_path: Path) -> None:
    """Each advantage is pass@2 with the row less pass@2 without it, over all pairs of its siblings."""
    keys = ("+pass_at_k@pass_at_k=loo", "pass_at_k.k=2", f"offpolicy.record.dir={tmp_path / 'record'}")
    output, last = run(launching, "one_step_off", *keys)
    assert "pass@k LIVE on" in output
    assert last["offpolicy/live/pass_at_k"] == 1.0
    mixed = 0
    for group in read_groups(tmp_path / "record"):
        right = [reward >= 1.0 for reward, *_ in group]
        mixed += any(right) and not all(right)
        for row, (_, dealt, _) in enumerate(group):
            others = right[:row] + right[row + 1 :]
            wanted = 2 * (mean(right[row] or one for one in others) - mean(map(any, combinations(others, 2))))
            np.testing.assert_allclose(dealt, wanted, atol=1e-6)
    assert mixed > 0


def test_steps_are_credited(launching: Any, tmp_path: Path) -> None:
    """verl's advantage of the outcome and, from each token on, the utilities standardised over the group's episodes."""
    model = prepare("sums", "sums_model")
    keys = (
        "+process_reward@process_reward=prefix_value",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder(CACHE, 'sums') / 'train.parquet'}",
        f"data.val_files={folder(CACHE, 'sums') / 'heldout.parquet'}",
        *SUMS_OVERRIDES[:3],
        f"offpolicy.record.dir={tmp_path / 'record'}",
    )
    _, last = run(launching, "one_step_off", *keys)
    assert last["offpolicy/live/process_reward"] == 1.0
    assert last["process_reward/live/compared_prefixes"] > 0
    checked = 0
    for group in read_groups(tmp_path / "record"):
        outcomes = standardise([reward for reward, *_ in group])
        flat = [float(each) for *_, utilities in group for each in utilities[~np.isnan(utilities)]]
        credits = iter(standardise(flat))
        for outcome, (_, dealt, utilities) in zip(outcomes, group, strict=True):
            own = np.array([0.0 if math.isnan(each) else next(credits) for each in utilities])
            np.testing.assert_allclose(dealt, outcome + own[::-1].cumsum()[::-1], atol=1e-3)
            checked += len(dealt)
    assert checked > 1000
