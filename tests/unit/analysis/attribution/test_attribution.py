"""The text of an attribution: for runs without a cause, for pi_old derived from mu, and for faults that must be fixed
first.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipe.offpolicy import attribute as command
from recipe.offpolicy.analysis.attribution.attribution import attribute, describe_recorded_faults
from recipe.offpolicy.analysis.attribution.attribution_page import build_shares_table, format_verdict, is_healthy
from recipe.offpolicy.analysis.attribution.causes import find_truncation
from recipe.offpolicy.analysis.attribution.partial_causes import ROUNDED
from recipe.offpolicy.analysis.attribution.recorded_tokens import collect_tokens
from recipe.offpolicy.calibrate import main as calibrate
from recipe.offpolicy.recording import Recording, RecordingError, Rows, concatenate
from tests.support.attributed import attribute_rows
from tests.support.paths import ROOT
from tests.support.recordings import drawn_rows
from tests.support.unscored import MADE_OF_MU, recorded_under

LENGTHS = [20] * 64


def test_a_large_mismatch_without_a_cause_is_said_to_be_large() -> None:
    """Noise of 0.3 nats, equal at every probability, has none of the causes' signatures."""
    found = attribute_rows(drawn_rows(LENGTHS, backend=0.3), {})
    assert "present" not in {cause.verdict for cause in found.causes}
    assert not is_healthy(found)
    assert format_verdict(found).startswith("The mismatch is large and its cause unknown: KL(mu, pi_old) is 0.0")
    assert "steps old" not in format_verdict(found)


def test_what_cannot_be_looked_for_is_not_called_even() -> None:
    rows = drawn_rows(LENGTHS)
    copied = attribute_rows(replace(rows, old_log_prob=rows.rollout_log_prob), {})
    assert "mu equals pi_old bit for bit: one may be a copy of the other" in format_verdict(copied)
    one_engine = {"correction": {"proximal": "same_engine"}}
    alike = attribute_rows(replace(rows, old_log_prob=rows.rollout_log_prob), one_engine)
    assert "there is nothing to explain, as with correction.proximal=same_engine" in format_verdict(alike)
    assert "5 tokens are recorded" in format_verdict(attribute_rows(drawn_rows([5]), {}))


def at_gradient_step(rows: Rows, number: int) -> Rows:
    return replace(rows, mini_batch=np.full(len(rows), number, dtype=np.int32))


def of_two_gradient_steps() -> tuple[Rows, Rows]:
    """The first gradient step has only the engines' noise; in the second, pi has moved by 0.5 nats per token."""
    return drawn_rows(LENGTHS, backend=0.1), at_gradient_step(drawn_rows(LENGTHS, seed=1, backend=0.1, drift=0.5), 1)


@pytest.mark.parametrize("proximal", [*MADE_OF_MU, "reuse"])
def test_the_first_gradient_step_is_attributed_as_if_pi_old_were_recorded(proximal: str, tmp_path: Path) -> None:
    """The rows are fresh, so the whole mismatch is backend, and none is drift."""
    rows = drawn_rows(LENGTHS, backend=0.1)
    found = attribute(recorded_under(proximal, tmp_path / "run", rows))
    known = attribute(recorded_under("recompute", tmp_path / "known", rows))
    assert found == known
    assert found.whole.kl.backend == pytest.approx(1.0)
    assert found.whole.kl.drift == pytest.approx(0.0)
    assert found.left_out == 0


@pytest.mark.parametrize("proximal", ["bypass", "loglinear"])
def test_drift_is_not_identified_beside_later_gradient_steps(proximal: str, tmp_path: Path) -> None:
    """pi_old of these rows is unknown, so they have no share, and the text says that they are left out."""
    first, later = of_two_gradient_steps()
    found = attribute(recorded_under(proximal, tmp_path / "run", concatenate([first, later])))
    alone = attribute(recorded_under("recompute", tmp_path / "known", first))
    assert (found.rows, found.left_out) == (64, 64)
    for part in (found.whole, *found.by_step.values()):
        assert part.kl.drift is part.variance.drift is None
        assert not any(key.endswith("drift") for key in part.intervals)
    assert found.whole.kl.backend == alone.whole.kl.backend
    assert found.causes == alone.causes
    assert all(np.isnan(bucket.drift_std) for buckets in found.profiles.values() for bucket in buckets)
    assert list(build_shares_table(found.whole).rows[2])[2:] == ["not identified", "", "not identified", ""]
    assert "64 rows of later gradient steps are excluded" in format_verdict(found)


def test_nothing_is_claimed_without_a_first_gradient_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = recorded_under("bypass", tmp_path / "run", of_two_gradient_steps()[1])
    assert command.main([str(recording.directory)]) == 2
    assert "64 rows are recorded, but no row belongs to the first gradient step" in capsys.readouterr().err


REAL = ROOT / "tests" / "data" / "faults" / "held_out"
STALE, HEALTHY = REAL / "stale-2-7", REAL / "healthy-10"
ASKED = ("--spec", "correction=[tis_token,gsm]", "--target-kept", "0.98")
FIRST = "The mismatch has a cause that must be fixed first"


@pytest.mark.slow
def test_calibrate_says_it_above_its_proposals(capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate([str(STALE), *ASKED]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{FIRST}: stale weights (synchronise at every step")
    assert printed.index(FIRST) < printed.index("Proposed bounds")
    assert calibrate([str(HEALTHY), *ASKED, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mend_first"] is None


RECORDINGS = ROOT / "tests" / "data" / "faults" / "held_out"
EQUAL = {"step": 1, "verdict": "equal", "along": 0.9, "square": 1.0}
WRONG = {"step": 2, "verdict": "different", "sentence": "12 of 26 tensors differ."}


def copy_recording(folder: Path, *lines: str, source: str = "colocate_async-14") -> Recording:
    for path in (RECORDINGS / source).iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "delivery.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return Recording(folder)


def test_updates_that_are_rounded_away_are_told_from_staleness(tmp_path: Path) -> None:
    """In both runs, the KL grows from step to step; rounding explains this only if all weights were delivered."""
    lines = [(EQUAL | {"along": 0.13},), (EQUAL,), (EQUAL | {"along": 0.13}, WRONG)]
    folders = [tmp_path / str(number) for number in range(len(lines))]
    verdicts = []
    for folder, delivered in zip(folders, lines, strict=True):
        folder.mkdir()
        recording = copy_recording(folder, *map(json.dumps, delivered), source="stale-2-7")
        found = attribute(recording)
        assert describe_recorded_faults(recording, recording.card) == found.mend_first
        verdicts.append({cause.name: cause.verdict for cause in found.causes})
        assert ("stale weights" in found.mend_first) == (delivered != lines[0])
    assert [(each[ROUNDED], each["stale weights"]) for each in verdicts] == [
        ("present", "not testable"),
        ("absent", "present"),
        ("present", "present"),
    ]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    recording = copy_recording(tmp_path, "{")
    with pytest.raises(RecordingError, match=r"delivery\.jsonl"):
        list(recording.delivery)


def test_a_missing_mass_is_a_mass() -> None:
    """With noise of 3 nats, the mean of pi_old/mu is e^4.5, about 90, and 1 - 90 is not a probability."""
    for cause in find_truncation(collect_tokens(drawn_rows(LENGTHS, backend=3.0)), {}):
        assert cause.verdict == "absent"
        assert "the mean of pi_old/mu" in cause.sentence
        assert "missing" not in cause.evidence
        assert cause.evidence["mean_ratio"] > 2
    for cause in find_truncation(collect_tokens(drawn_rows(LENGTHS, backend=0.1)), {}):
        assert "cut off" in cause.sentence
        assert abs(cause.evidence["missing"]) < 0.05
