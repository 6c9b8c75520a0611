"""Extensions in verl's asynchronous programs on a CPU: proved, and equal to their definition where it is recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.quickstart.prepare import folder
from scripts.quickstart.processes import Teacher
from scripts.quickstart.run import CACHE
from tests.integration.test_programs import PROGRAMS, launch, read_steps
from tests.integration.test_turn_credit import CREDIT, TOOLS, count_right_advantages
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
def test_a_teacher_is_asked(name: str, launching: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.quickstart.prepare", "--cache", str(CACHE), "teacher"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    environment = {**os.environ, "PLATFORM": "cpu", "VENV": sys.prefix}
    teacher = Teacher(folder(CACHE, "teacher"), environment, tmp_path / "teacher.log", ROOT)
    try:
        list(teacher.wait(lambda: None))
        keys = (f"opd.teacher.url={teacher.url}", "opd.eligible.passed_above=0.99")
        _, last = run(launching, name, "+opd@opd=advantage", *keys)
    finally:
        teacher.child.process.terminate()
        teacher.child.process.wait(60)
    assert last["offpolicy/live/opd"] == 1.0
    assert last["opd/frac_opd_samples"] > 0


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
