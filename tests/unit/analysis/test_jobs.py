"""Steps that several processes handle, or that are read in pieces, give the same results as whole steps."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.analysis import AnalysisError
from recipe.offpolicy.analysis.attribution.attribution import attribute
from recipe.offpolicy.analysis.calibration.calibration_page import compute_joint_shares
from recipe.offpolicy.analysis.calibration.propose import CalibrationRequest, propose_bounds
from recipe.offpolicy.analysis.calibration.scores import PromptSample, hash_prompts
from recipe.offpolicy.analysis.jobs import ALONE, Jobs
from recipe.offpolicy.analysis.whatif.candidates import Candidate
from recipe.offpolicy.analysis.whatif.study import run_study
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording import Recording
from tests.support.corrections import GSM, M2PO, TIS, spec
from tests.support.recordings import drawn_rows, record


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.slow
def test_a_dead_process_is_an_error() -> None:
    with pytest.raises(AnalysisError, match=r"a process died\. Fix: run with --jobs 1"):
        list(Jobs(2).map(die, range(8)))


@pytest.fixture
def recorded(tmp_path: Path) -> Recording:
    """Three steps with fresh and stale rows of eight prompts."""
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


ADDING = spec(TIS, gsm=GSM)
FIXED = spec(TIS | {"normalize": True}, m2po=M2PO)
"""A correction whose parts need batch-level constants."""


@pytest.fixture
def of_three_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """One step of three ranks, which share the rows of each prompt; each file is a piece."""
    ranks = (drawn_rows([9] * 16, step=2, seed=rank, rank=rank, group=4, backend=0.05, drift=0.02) for rank in range(3))
    of_three_ranks = Recording(record(tmp_path, *ranks))
    monkeypatch.setattr(Recording.in_pieces, "__defaults__", (1,))
    return of_three_ranks


def read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording.in_pieces, "__defaults__", (float("inf"),))


def test_a_replay(of_three_ranks: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a correction with batch-level constants, the step is put together first."""
    for specs in ([ADDING], [ADDING, FIXED]):
        named = [Candidate(str(place), str(place), {}, each) for place, each in enumerate(specs)]
        monkeypatch.setattr(Recording.in_pieces, "__defaults__", (1,))
        pieces = run_study(of_three_ranks, of_three_ranks.steps, named)
        read_whole(monkeypatch)
        whole = run_study(of_three_ranks, of_three_ranks.steps, named)
        assert (pieces.rows, pieces.tokens, pieces.notes) == (whole.rows, whole.tokens, whole.notes)
        assert pieces.fidelity.tokens == whole.fidelity.tokens == 3 * 16 * 9
        assert pieces.agreement.cosine == pytest.approx(whole.agreement.cosine)
        for one, other in zip(pieces.outcomes, whole.outcomes, strict=True):
            assert vars(one.overall) == pytest.approx(vars(other.overall))
            assert one.groups.keys() == other.groups.keys()


@pytest.mark.parametrize("correction", [ADDING, FIXED])
def test_a_calibration(of_three_ranks: Recording, monkeypatch: pytest.MonkeyPatch, correction: Any) -> None:
    request = CalibrationRequest(target_kept=0.9, target_ess=0.9)
    pieces = propose_bounds(of_three_ranks, correction, request), compute_joint_shares(of_three_ranks, [correction])
    read_whole(monkeypatch)
    whole = propose_bounds(of_three_ranks, correction, request), compute_joint_shares(of_three_ranks, [correction])
    assert pieces[0].spec == whole[0].spec != correction
    assert [vars(one) for one in pieces[1]] == [pytest.approx(vars(one)) for one in whole[1]]


def test_rows_without_a_prompt_are_told_apart_by_update() -> None:
    """A piece may contain another update of the same rank."""
    rows = drawn_rows([1, 1], uid=np.array(["", ""], dtype=object))
    later = replace(rows, mini_batch=rows.mini_batch + 1)
    assert len({*hash_prompts(rows).tolist(), *hash_prompts(later).tolist()}) == 4
