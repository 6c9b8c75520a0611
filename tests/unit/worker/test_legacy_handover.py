"""The correction as it travels to verl's legacy actors."""

from __future__ import annotations

import pickle

from recipe.offpolicy.batch.plan import SharedPlan
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.add_on import WorkerExtension
from recipe.offpolicy.worker.legacy_loss import Handover
from tests.support.corrections import TIS, spec

PLAN = SharedPlan(3)


def test_it_travels_by_value() -> None:
    made = Handover(spec(TIS), PLAN, True, extensions={})
    assert pickle.loads(pickle.dumps(made)) == made
    assert made.reads_rollout_log_probs


def test_extensions_travel_along() -> None:
    extension = WorkerExtension()
    made = Handover(CorrectionSpec(), PLAN, extensions={"nudge": extension})
    assert made.extensions == {"nudge": extension}
    # Without a correction it is the extension that makes the actor train with our loss, and read mu.
    assert made.reads_rollout_log_probs
    assert made.reads_rollout_log_probs


def test_nothing_configured_leaves_verls_loss() -> None:
    made = Handover(CorrectionSpec(), PLAN, extensions={})
    assert not made.reads_rollout_log_probs
    assert not made.reads_rollout_log_probs
