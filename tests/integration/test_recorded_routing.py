"""A real run with routing replay records log pi_old without it, and attribution sets the routing part apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe.offpolicy.analysis.attribution.attribution import attribute
from recipe.offpolicy.recording import Recording
from tests.support.whole_runs import INJECTED, train

pytestmark = [pytest.mark.verl("==0.9.1"), pytest.mark.slow, pytest.mark.extended]


def test_what_replay_takes_away_is_a_part_of_its_own(run_program: Callable[..., Any], tmp_path: Path) -> None:
    finished = train(
        run_program,
        "model=moe",
        "actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3",
        "trainer.total_training_steps=1",
        f"offpolicy.record.dir={tmp_path / 'recording'}",
        "offpolicy.record.without_replay=true",
        # Else it is left to near ties of the weights that the warm start ends in whether choices differ.
        **INJECTED,
        OFFPOLICY_INJECT="routers:0",
    )
    assert finished.returncode == 0, finished.output[-3000:]
    found = attribute(Recording(tmp_path / "recording")).whole
    assert found.kl.routing is not None
    assert found.kl.rollout + found.kl.routing + found.kl.drift == pytest.approx(1.0)
    assert found.replayed_kl is not None
    assert found.intervals["kl.routing"][0] > 0
    assert found.kl.whole > found.replayed_kl
