"""Tables, document and page of a study, on one replay of two rows; and what the command hands to it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from recipe.offpolicy.analysis.whatif.candidates import UNCORRECTED, Candidate
from recipe.offpolicy.analysis.whatif.study import Fidelity, Study, run_study
from recipe.offpolicy.analysis.whatif.whatif_page import (
    build_agreement_tables,
    build_document,
    build_group_table,
    build_overall_table,
    collect_kept_shares,
    describe_fidelity,
    list_groups,
)
from recipe.offpolicy.recording import Recording
from tests.support.acted import by_hand, recorded
from tests.support.corrections import band, spec

LOG2 = math.log(2.0)
# pi_old / mu by token: row 0 (A = 1): 4, 1, 1/2; row 1 (A = -2): 2, 2; geometric means 1.26 and 2.
MU = [[-3.0, -2.0, -1.0], [-2.0, -2.0]]
OLD = [[-3.0 + 2 * LOG2, -2.0, -1.0 - LOG2], [-2.0 + LOG2, -2.0 + LOG2]]
BOTH = {"one": spec(None, m=band(0.5, 1.7)), "none kept": spec(None, m=band(0.9, 1.1))}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = by_hand(OLD, MU, advantages=np.array([1, 1, 1, -2, -2], dtype=np.float32))
    return recorded(tmp_path_factory.mktemp("recording"), BOTH["one"], rows)


@pytest.fixture(scope="module")
def study(directory: Path) -> Study:
    recording = Recording(directory)
    named = [Candidate(name, name, {}, each) for name, each in BOTH.items()]
    return run_study(recording, recording.steps, [Candidate(UNCORRECTED, UNCORRECTED), *named])


def test_a_line_for_each_correction(study: Study) -> None:
    table = build_overall_table(study)
    kept = [column.name for column in table.columns].index("tokens kept")
    assert [(row[1], row[kept]) for row in table.rows] == [("uncorrected", 1.0), ("one", 0.6), ("none kept", 0.0)]


def test_tokens_kept_by_group(study: Study) -> None:
    """Row 0 of a positive advantage is kept by "one", row 1 of a negative one is not."""
    names = list_groups(study.outcomes[0])
    assert (names["advantage/positive"], names["advantage/negative"]) == ("A > 0", "A < 0")
    shares = collect_kept_shares(study.outcomes[1])
    assert (shares["advantage/positive"], shares["advantage/negative"]) == (1.0, 0.0)
    table = build_group_table(study)
    place = [column.name for column in table.columns].index("A < 0")
    assert [row[place] for row in table.rows] == [1.0, 0.0, 0.0]


def test_agreement_of_each_pair(study: Study) -> None:
    """ "one" rejects 2 tokens, "none kept" all 5: 2 in common of 5."""
    tokens, *_, cosine = build_agreement_tables(study)
    assert tokens.title == "Rejected tokens in common (Jaccard)"
    assert 0.4 in [pytest.approx(value) for value in tokens.rows[0][1:] if value is not None]
    assert len(cosine.rows) == 3


def test_the_replay_of_the_record_is_judged(study: Study) -> None:
    assert study.fidelity.agrees
    assert "agrees with the recording" in describe_fidelity(study.fidelity)
    assert describe_fidelity(Fidelity()).startswith("The replay was not compared")
    differs = describe_fidelity(Fidelity(tokens=5, weights=1))
    assert differs.startswith("MISMATCH: ")
    assert "0 decisions and 1 weights of 5 tokens" in differs


def test_the_document_is_of_plain_values(study: Study) -> None:
    found = json.loads(json.dumps(build_document(study), allow_nan=False))
    assert [each["label"] for each in found["corrections"]] == ["uncorrected", "one", "none kept"]
    assert found["corrections"][1]["overall"]["kept_tokens"] == pytest.approx(0.6)
    assert found["fidelity"]["agrees"] is True
