"""What is attributed where the run took mu, or a mixture of mu and pi, for pi_old."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipe.offpolicy import attribute as command
from recipe.offpolicy.analysis.attribution.attribution import attribute
from recipe.offpolicy.analysis.attribution.attribution_page import (
    build_shares_table,
    build_steps_table,
    format_verdict,
)
from recipe.offpolicy.recording import Rows, concatenate
from tests.support.recordings import drawn_rows
from tests.support.simulated_policies import Size, at_temperature, simulated
from tests.support.unscored import MADE_OF_MU, recorded_under

LENGTHS = [20] * 64


def at_gradient_step(rows: Rows, number: int) -> Rows:
    return replace(rows, mini_batch=np.full(len(rows), number, dtype=np.int32))


def of_two_gradient_steps() -> tuple[Rows, Rows]:
    """The first with the engines' noise alone; in the second pi has moved by 0.5 nats a token."""
    return drawn_rows(LENGTHS, backend=0.1), at_gradient_step(drawn_rows(LENGTHS, seed=1, backend=0.1, drift=0.5), 1)


@pytest.mark.parametrize("proximal", [*MADE_OF_MU, "reuse"])
def test_the_first_gradient_step_is_attributed_as_if_pi_old_were_recorded(proximal: str, tmp_path: Path) -> None:
    """Fresh rows: all of it is the backend's, none of it drift."""
    rows = drawn_rows(LENGTHS, backend=0.1)
    found = attribute(recorded_under(proximal, tmp_path / "run", rows))
    known = attribute(recorded_under("recompute", tmp_path / "known", rows))
    assert found == known
    assert found.whole.kl.backend == pytest.approx(1.0)
    assert found.whole.kl.drift == pytest.approx(0.0)
    assert found.left_out == 0


@pytest.mark.parametrize("proximal", MADE_OF_MU)
def test_causes_are_looked_for_in_the_whole_gap(proximal: str, tmp_path: Path) -> None:
    """Of a temperature of 0.7 the slope is 1 / 0.7, not that of a mixture."""
    recording = recorded_under(proximal, tmp_path / "run", simulated(at_temperature(0.7), size=Size(steps=1)))
    causes = {cause.name: cause for cause in attribute(recording).causes}
    assert causes["temperature"].verdict == "present"
    assert causes["temperature"].evidence["slope"] == pytest.approx(1 / 0.7, abs=0.03)


@pytest.mark.parametrize("proximal", MADE_OF_MU)
def test_drift_is_not_identified_beside_later_gradient_steps(proximal: str, tmp_path: Path) -> None:
    """pi_old of their rows is not known: no share is claimed of them, and what is left out is said."""
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
    table = build_shares_table(found.whole)
    assert table.title == "log pi_old/mu, split"
    assert list(table.rows[2])[2:] == ["not identified", "", "not identified", ""]
    assert list(build_steps_table(dict(found.by_step)).rows[0])[5] is None
    assert "64 rows of later gradient steps are left out" in format_verdict(found)
    assert "correction.proximal=recompute" in format_verdict(found)


@pytest.mark.parametrize("proximal", MADE_OF_MU)
def test_nothing_is_claimed_without_a_first_gradient_step(
    proximal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = recorded_under(proximal, tmp_path / "run", of_two_gradient_steps()[1])
    assert command.main([str(recording.directory)]) == 2
    assert "64 rows are recorded, but none during the first gradient step" in capsys.readouterr().err
