"""Control runs of the whole system, in which the size of the mismatch is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.whole_runs import trained

pytestmark = [pytest.mark.slow, pytest.mark.extended]


def test_negative_control_equal_engines_leave_nothing_to_correct(run_program: Callable[..., Any]) -> None:
    """With float32 in both engines, on the V0 trainer, the KL is below 1e-6, weights are 1 within 1e-5, and the
    correction is live.
    """
    steps = trained(
        run_program,
        "correction=[tis_token,gsm,trl/opsm]",
        "trainer.total_training_steps=3",
        "trainer.use_v1=false",
        "actor_rollout_ref.rollout.dtype=float32",
    )
    assert len(steps) == 3
    for step in steps:
        assert abs(step["offpolicy/kl/k3"]) < 1e-6
        assert step["offpolicy/weight/std"] < 1e-5
        # Now and then a token is sampled whose probability float32 knows less well.
        assert step["offpolicy/weight/min"] == pytest.approx(1.0, abs=1e-4)
        assert step["offpolicy/weight/max"] == pytest.approx(1.0, abs=1e-4)
        assert step["offpolicy/mask/gsm/masked_sequence_share"] == 0.0
        assert step["offpolicy/live/proved"] == 1.0
    # Two gradient steps on each batch: the current policy moves away from pi_old, and the full ratio sees it.
    assert steps[0]["offpolicy/ppo_ratio/std"] > 1e-4


def test_positive_control_stale_batches_reach_the_cap_and_set_off_the_fallback(
    run_program: Callable[..., Any],
) -> None:
    """In colocate_async, older weights sample every second batch, so weights reach the cap and the active correction
    changes.
    """
    alarm = "offpolicy.alarms.ess"
    steps = trained(
        run_program,
        "correction=[tis_token,gsm]",
        "trainer.total_training_steps=4",
        "trainer.v1.trainer_mode=colocate_async",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        *(f"offpolicy.alarms.{name}.action=off" for name in ("mean_weight", "kept_share", "mismatch_growth")),
        *(f"{alarm}.{key}=0.99" for key in ("lower", "recovery_lower")),
        *(f"{alarm}.{key}=1" for key in ("patience", "recovery_patience", "return_after")),
        f"{alarm}.action=fallback",
        f"{alarm}.fallback=[tis_sequence,gsm]",
        "offpolicy.calibrate.target_kept=0.7",
        "offpolicy.calibrate.warmup=1",
    )
    staleness = [step["training/off_policy/trajectory_staleness/mean"] for step in steps]
    assert staleness == [0, 1, 0, 1]
    assert [step["offpolicy/staleness/mean"] for step in steps] == staleness
    fresh, stale = steps[::2], steps[1::2]
    for step in stale:
        assert step["offpolicy/kl/k3"] > 0.01
        assert step["offpolicy/weight/max"] == 2.0
        assert step["offpolicy/weight/truncated_share"] > 0.0
        assert step["offpolicy/weight/ess"] < 0.99
    for step in fresh:
        assert step["offpolicy/kl/k3"] < 0.01
        assert step["offpolicy/weight/max"] < 2.0
    assert all(math.isfinite(step["actor/grad_norm"]) for step in steps)

    # The stale batches set the alarm off, the third runs the fallback and is quiet.
    assert [step["offpolicy/alarm/ess"] for step in steps] == staleness
    assert [step["offpolicy/alarm/active_correction"] for step in steps] == [0, 0, 1, 0]
    assert [step["offpolicy/live/proved"] for step in steps] == [1, 1, 1, 1]
    prints = [step["offpolicy/live/fingerprint"] for step in steps]
    assert prints[0] == prints[1] == prints[3] != prints[2]
    # More than 0.7 of the first batch was kept, so that the band has closed, and stays while the fallback is there.
    kept, upper = ([step[f"offpolicy/calibrate/gsm/{part}"] for step in steps] for part in ("kept", "upper"))
    assert kept[0] > 0.7
    assert upper[0] == 1.01 > upper[1] == upper[2] == upper[3]
    assert kept[2] is None or kept[2] != kept[2]
    keys = {frozenset(key for key in step if key.startswith(("offpolicy/alarm", "offpolicy/calib"))) for step in steps}
    assert len(keys) == 1
