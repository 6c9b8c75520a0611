"""Process rewards in whole runs, each with a fault that makes values wrong; every fault stops the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.whole_runs import broken

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.verl("==0.9.1")]

PRECISE = ("actor_rollout_ref.rollout.dtype=float32", "trainer.total_training_steps=3")
UNCHECKED = ("offpolicy.delivery.sums=null", "offpolicy.delivery.probe=null")
OTHER = "has different weights, or reads a stale prefix cache"


def test_weights_that_were_not_synchronised_stop_the_step_behind(run_program: Callable[..., Any]) -> None:
    """The second synchronisation sends the weights of the first one again, with the new version number."""
    run = broken(run_program, "stale_weights:2", *UNCHECKED, "process_reward=prefix_value", *PRECISE)
    assert OTHER in run.log
    assert len(run.steps) == 1


def test_rows_that_lost_their_values_stop_the_first_step(run_program: Callable[..., Any]) -> None:
    run = broken(run_program, "lost_values:1", "process_reward=prefix_value", *PRECISE)
    assert "have no values" in run.log
    assert run.steps == []
