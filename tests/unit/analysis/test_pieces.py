"""Tools that read a large step piece by piece find what they find in the whole step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.analysis.attribution import attribution
from recipe.offpolicy.analysis.calibration.calibration_page import compute_joint_shares
from recipe.offpolicy.analysis.calibration.propose import CalibrationRequest, propose_bounds
from recipe.offpolicy.analysis.calibration.scores import hash_prompts
from recipe.offpolicy.analysis.jobs import ALONE, map_steps
from recipe.offpolicy.analysis.whatif.candidates import Candidate
from recipe.offpolicy.analysis.whatif.study import run_study
from recipe.offpolicy.recording import Recording
from tests.support.corrections import GSM, M2PO, TIS, spec
from tests.support.recordings import drawn_rows, record

ADDING = spec(TIS, gsm=GSM)
FIXED = spec(TIS | {"normalize": True}, m2po=M2PO)
"""A correction whose parts are fixed for the whole batch."""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """One step of three ranks, which share the rows of each prompt; each file is a piece."""
    ranks = (drawn_rows([9] * 16, step=2, seed=rank, rank=rank, group=4, backend=0.05, drift=0.02) for rank in range(3))
    recorded = Recording(record(tmp_path, *ranks))
    monkeypatch.setattr(Recording.in_pieces, "__defaults__", (1,))
    return recorded


def read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording.in_pieces, "__defaults__", (float("inf"),))


def count_parts(steps: Any) -> int:
    return len(list(steps))


def test_work_gets_pieces_where_it_can(recorded: Recording) -> None:
    assert list(map_steps(count_parts, recorded, ALONE, "counting")) == [1]
    assert list(map_steps(count_parts, recorded, ALONE, "counting", in_pieces=True)) == [3]


def test_a_replay(recorded: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a correction that is fixed for the whole batch the step is put together."""
    for specs in ([ADDING], [ADDING, FIXED]):
        named = [Candidate(str(place), str(place), {}, each) for place, each in enumerate(specs)]
        monkeypatch.setattr(Recording.in_pieces, "__defaults__", (1,))
        pieces = run_study(recorded, recorded.steps, named)
        read_whole(monkeypatch)
        whole = run_study(recorded, recorded.steps, named)
        assert (pieces.rows, pieces.tokens, pieces.notes) == (whole.rows, whole.tokens, whole.notes)
        assert pieces.fidelity.tokens == whole.fidelity.tokens == 3 * 16 * 9
        assert pieces.agreement.cosine == pytest.approx(whole.agreement.cosine)
        for one, other in zip(pieces.outcomes, whole.outcomes, strict=True):
            assert vars(one.overall) == pytest.approx(vars(other.overall))
            assert one.groups.keys() == other.groups.keys()


@pytest.mark.parametrize("correction", [ADDING, FIXED])
def test_a_calibration(recorded: Recording, monkeypatch: pytest.MonkeyPatch, correction: Any) -> None:
    request = CalibrationRequest(target_kept=0.9, target_ess=0.9)
    pieces = propose_bounds(recorded, correction, request), compute_joint_shares(recorded, [correction])
    read_whole(monkeypatch)
    whole = propose_bounds(recorded, correction, request), compute_joint_shares(recorded, [correction])
    assert pieces[0].spec == whole[0].spec != correction
    assert [vars(one) for one in pieces[1]] == [pytest.approx(vars(one)) for one in whole[1]]


def test_a_search_for_faults(recorded: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sample of the step: the rows that are searched are the same."""
    searched = []
    monkeypatch.setattr(attribution, "TOKENS", 100)
    monkeypatch.setattr(attribution, "find_causes", lambda rows, card: searched.append(rows) or [])
    attribution.describe_recorded_faults(recorded, {})
    read_whole(monkeypatch)
    attribution.describe_recorded_faults(recorded, {})
    pieces, whole = searched
    assert 0 < len(whole) < 3 * 16
    assert np.array_equal(pieces.log_prob, whole.log_prob)


def test_rows_without_a_prompt_are_told_apart_by_update() -> None:
    """A piece may hold another update of the same rank."""
    rows = drawn_rows([1, 1], uid=np.array(["", ""], dtype=object))
    later = replace(rows, mini_batch=rows.mini_batch + 1)
    assert len({*hash_prompts(rows).tolist(), *hash_prompts(later).tolist()}) == 4
