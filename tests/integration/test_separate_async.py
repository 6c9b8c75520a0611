"""verl's separate asynchronous mode on CPU: trainer and rollouts in processes of their own, the correction live."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.whole_runs import trained

STEPS = 5

pytestmark = [pytest.mark.slow, pytest.mark.extended]


def test_the_correction_is_live_on_rows_of_staleness_0_1_and_2(run_program: Callable[..., Any]) -> None:
    """Two batches wait when training starts, so that rows grow two steps old, and no older.

    Each step makes two updates between two synchronisations, both with the pi_old of the first.
    """
    steps = trained(
        run_program,
        "+mode=separate_async_cpu",
        "correction=[tis_token,gsm]",
        f"trainer.total_training_steps={STEPS}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    )
    assert len(steps) == STEPS

    for step in steps:
        assert step["offpolicy/live/proved"] == 1.0
        assert math.isfinite(step["actor/grad_norm"])
        # 16 prompts of 8 rows in two updates: statistics are of the whole step.
        sequences = [value for name, value in step.items() if re.fullmatch(r"offpolicy/length/\w+/sequences", name)]
        assert sum(sequences) == 128
        # The first update of a step is on policy towards pi_old, the second is not: unless pi_old is the current
        # policy, as it is where the snapshot of its weights is not a copy.
        assert step["offpolicy/ppo_ratio/std"] > 1e-3
        # verl's own count is by row, whose first attempt may have been aborted before its first token.
        assert step["offpolicy/staleness/max"] <= step["training/off_policy/trajectory_staleness/max"]
        assert step["offpolicy/staleness/ge3/token_count"] == 0.0
    for age in ("is0", "is1", "is2"):
        assert sum(step[f"offpolicy/staleness/{age}/token_count"] for step in steps) > 0.0
    assert steps[0]["offpolicy/staleness/max"] == 0.0
    fresh = [step for step in steps if step["offpolicy/staleness/max"] == 0.0]
    stale = [step for step in steps if step["offpolicy/staleness/is0/token_count"] == 0.0]
    assert stale
    for step in fresh:
        assert step["offpolicy/kl/k3"] < 0.01
        assert step["offpolicy/weight/max"] < 2.0
    for step in stale:
        assert step["offpolicy/kl/k3"] > 0.01
        assert step["offpolicy/weight/max"] == 2.0
        assert step["offpolicy/mask/gsm/masked_sequence_share"] > 0.5
