"""Steps worked on by one process or by several give the same, in order, and a process that dies loses nothing."""

from __future__ import annotations

import argparse
import os
import resource
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch

from recipe.offpolicy.analysis import jobs
from recipe.offpolicy.analysis.attribution.attribution import attribute
from recipe.offpolicy.analysis.calibration.calibration_page import compute_joint_shares
from recipe.offpolicy.analysis.calibration.propose import CalibrationRequest, propose_bounds
from recipe.offpolicy.analysis.calibration.scores import PromptSample
from recipe.offpolicy.analysis.jobs import (
    ALONE,
    Jobs,
    JobsError,
    map_steps,
    prepare_process,
    read_arguments,
)
from recipe.offpolicy.analysis.report.timeline import build_timeline
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording import Recording, Step
from tests.support.corrections import GSM
from tests.support.recordings import drawn_rows, record


def square(number: int) -> int:
    return number * number


def fail(number: int) -> int:
    raise ValueError(f"{number} is bad")


def die_once(folder: Path, number: int) -> int:
    """As a process does that the system ends for lack of memory, at the first try of one item."""
    marker = folder / str(number)
    if number == 3 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("count", [1, 2])
def test_results_come_in_order(count: int) -> None:
    assert list(Jobs(count).map(square, range(9))) == [n * n for n in range(9)]
    with pytest.raises(ValueError, match="0 is bad"):
        list(Jobs(count).map(fail, [0, 1]))


def test_few_results_wait_for_their_turn() -> None:
    """Nothing is begun beyond what a reader that stops can use."""
    begun: list[int] = []
    results = Jobs(1).map(begun.append, [1, 2, 3])
    next(results)
    assert begun == [1]


@pytest.mark.slow
def test_what_a_dead_process_worked_on_is_begun_again(tmp_path: Path) -> None:
    assert list(Jobs(2).map(partial(die_once, tmp_path), range(8))) == list(range(8))
    with pytest.raises(JobsError, match=r"died, 3 times\. Fix: run with --jobs 1"):
        list(Jobs(2).map(die, range(8)))


@pytest.fixture
def recorded(tmp_path: Path) -> Recording:
    """Three steps, of fresh and stale rows of eight prompts."""
    ages = np.repeat([0, 1], 16)
    steps = (
        drawn_rows([9] * 32, step=step, seed=step, group=4, backend=0.02, drift=0.01, oldest_version=step - 1 - ages)
        for step in (2, 3, 4)
    )
    return Recording(record(tmp_path / "recording", *steps))


@pytest.mark.slow
def test_an_attribution_does_not_depend_on_who_works_on_it(recorded: Recording) -> None:
    assert attribute(recorded) == attribute(recorded, jobs=Jobs(2))


@pytest.mark.slow
def test_a_calibration_does_not_depend_on_who_works_on_it(recorded: Recording) -> None:
    spec = CorrectionSpec.from_mapping({"masks": {"gsm": GSM}})
    request = CalibrationRequest(target_kept=0.9)
    sample = PromptSample(rows=0.6)
    one, two = (propose_bounds(recorded, spec, request, sample=sample, jobs=each) for each in (ALONE, Jobs(2)))
    assert one.spec == two.spec != spec
    assert [vars(each.threshold) for each in one.proposals] == [vars(each.threshold) for each in two.proposals]
    assert compute_joint_shares(recorded, [one.spec]) == compute_joint_shares(recorded, [one.spec], Jobs(2))


@pytest.mark.slow
def test_a_timeline_does_not_depend_on_who_works_on_it(recorded: Recording) -> None:
    assert build_timeline(recorded) == build_timeline(recorded, Jobs(2))


def test_steps_in_memory_are_worked_on_here(recorded: Recording) -> None:
    """Each by itself, whatever the number of processes: a closure could not be sent to another."""

    def list_steps(steps: Iterable[Step]) -> list[int]:
        return [int(step.rows.step[0]) for step in steps]

    assert list(map_steps(list_steps, list(recorded), Jobs(2), "reading")) == [[2], [3], [4]]
    assert list(map_steps(list_steps, recorded, ALONE, "reading")) == [[2], [3], [4]]


def test_a_large_recording_gets_a_process_a_core(recorded: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    none = argparse.Namespace(jobs=None, ray=None)
    assert read_arguments(none, recorded, recorded.steps) == Jobs(1)
    monkeypatch.setattr(jobs, "LARGE", 1.0)
    assert read_arguments(none, recorded, recorded.steps) == Jobs(len(os.sched_getaffinity(0)))
    assert read_arguments(argparse.Namespace(jobs=3, ray=None), recorded, recorded.steps) == Jobs(3)
    assert read_arguments(argparse.Namespace(jobs=None, ray="a:1"), recorded, recorded.steps) == Jobs(1, "a:1")


def test_progress_is_shown_on_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(Jobs(1).map(square, [1, 2], "reading")) == [1, 4]
    assert capsys.readouterr().err == ""


def test_a_process_is_prepared_for_arrays() -> None:
    """Memory of an array of 1 MB, 256 pages, comes without page faults once one of its size was freed."""

    def count_faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            np.ones(2**17)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    threads, processors = torch.get_num_threads(), pyarrow.cpu_count()
    try:
        prepare_process()
        assert torch.get_num_threads() == pyarrow.cpu_count() == 1
    finally:
        torch.set_num_threads(threads)
        pyarrow.set_cpu_count(processors)
    count_faults()
    assert count_faults() < 20 * 256 / 2
