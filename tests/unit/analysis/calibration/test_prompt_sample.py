"""A sample of prompts: whole prompts, the same whoever draws them, and bounds near those of all rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipe.offpolicy.analysis.calibration import scores
from recipe.offpolicy.analysis.calibration.kept_bounds import compute_kept_share
from recipe.offpolicy.analysis.calibration.parts import list_parts
from recipe.offpolicy.analysis.calibration.propose import CalibrationRequest, propose_bounds
from recipe.offpolicy.analysis.calibration.scores import (
    EVERY_PROMPT,
    PromptSample,
    Scores,
    compute_scores,
    hash_prompts,
    number_prompts,
)
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording import Recording, RecordingError, Step
from tests.support.corrections import GSM
from tests.support.recordings import NONE, drawn_rows, record

M2PO = {"ratio": "rollout", "level": "token", "aggregate": "second_moment", "budget": 0.01, "when": "any"}
ICEPOP = {"ratio": "rollout", "level": "token", "aggregate": "product", "lower": 0.5, "upper": 2.0, "when": "any"}
SPEC = CorrectionSpec.from_mapping({"masks": {"gsm": GSM, "icepop": ICEPOP, "m2po": M2PO}})


def steps_of(count: int, rows: int = 64) -> list[Step]:
    """Steps of rows of 5 to 9 tokens, 4 of each prompt, whose names no other step has."""
    found = []
    for step in range(1, count + 1):
        drawn = drawn_rows([5 + row % 5 for row in range(rows)], step=step, seed=step, backend=0.1, drift=0.05)
        named = np.array([f"{step}-{uid}" for uid in drawn.uid], dtype=object)
        found.append(Step(replace(drawn, uid=named), NONE, ()))
    return found


def test_a_share_of_the_prompts_is_drawn() -> None:
    """Of 4000 prompts a share of 0.3 is 1200, with a standard deviation of 29."""
    hashes = np.unique(hash_prompts(drawn_rows([1] * 4000, group=1)))
    few, more = (PromptSample(rows=0.5, tokens=share).find_rows(hashes, share) for share in (0.1, 0.3))
    assert more.sum() == pytest.approx(1200, abs=120)
    assert not (few & ~more).any()
    assert PromptSample(rows=0.5, tokens=0.1).find_rows(hashes).sum() == pytest.approx(2000, abs=130)
    assert EVERY_PROMPT.find_rows(np.append(hashes, np.uint64(2**64 - 1))).all()


def test_a_recording_is_sampled_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(record(tmp_path, *(step.rows for step in steps_of(3))))
    assert PromptSample.of_recording(recording) == EVERY_PROMPT
    assert EVERY_PROMPT.sentence == ""
    size = sum(path.stat().st_size for files in recording.files.values() for path in files)
    monkeypatch.setattr(scores, "TOKENS", size / 12 / 4)
    every_row = PromptSample.of_recording(recording)
    assert (every_row.tokens, every_row.rows) == pytest.approx((0.25, 1.0))
    assert "a share of 0.25 for parts that decide by token, and all for parts that decide by row." in every_row.sentence
    monkeypatch.setattr(scores, "ROWS", 96)
    assert PromptSample.of_recording(recording).rows == 0.5


def test_a_sample_holds_the_units_that_its_prompts_have_among_all() -> None:
    """Of a budget too, which each batch shares out among all of its rows."""
    steps, parts, sample = steps_of(3), list_parts(SPEC), PromptSample(tokens=0.3, rows=0.6)
    whole, states = compute_scores(steps, SPEC, parts)
    some, state = compute_scores(steps, SPEC, parts, sample=sample)
    prompts = np.concatenate([hash_prompts(step.rows) for step in steps])
    kept = sample.find_rows(prompts)
    assert 0 < kept.sum() < len(prompts)
    assert state.apart.tolist() == states.apart[kept].tolist()
    for part in parts:
        share = 0.6 if part.key == "masks.gsm" else 0.3
        expected: Scores = whole[part.key].select((prompts / 2.0**64 < share)[whole[part.key].row])
        found = some[part.key]
        assert len(found) > 0
        for name in ("low", "high", "looked", "tokens", "length"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist()
        assert np.flatnonzero(kept)[found.row].tolist() == expected.row.tolist()
        assert (
            number_prompts(found.group.astype(np.uint64)).tolist()
            == number_prompts(expected.group.astype(np.uint64)).tolist()
        )


def test_a_sample_without_a_prompt_is_refused() -> None:
    with pytest.raises(RecordingError, match="in the sampled prompts, which are only a few"):
        compute_scores(steps_of(1), SPEC, list_parts(SPEC), sample=PromptSample(tokens=0.5, rows=1e-9))


def test_a_bound_of_a_sample_keeps_nearly_the_target_of_all() -> None:
    """A fifth of 6400 rows: the kept share of all has a standard error of 0.006."""
    steps, spec = steps_of(25, rows=256), CorrectionSpec.from_mapping({"masks": {"gsm": GSM}})
    result = propose_bounds(steps, spec, CalibrationRequest(target_kept=0.95), sample=PromptSample(rows=0.2))
    (proposal,) = result.proposals
    assert proposal.threshold.count == pytest.approx(1280, abs=160)
    (part,) = list_parts(result.spec)
    scores, _ = compute_scores(steps, spec, [part])
    assert compute_kept_share(part, scores[part.key], part.limits) == pytest.approx(0.95, abs=0.02)
