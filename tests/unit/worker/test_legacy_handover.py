"""The correction as it travels to verl's legacy actors."""

from __future__ import annotations

import pickle

from recipe.offpolicy.batch.plan import SharedPlan
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.add_on import WorkerExtension
from recipe.offpolicy.worker.legacy_handover import ExtendedHandover, Handover, build_handover
from tests.support.corrections import TIS, spec

PLAN = SharedPlan(3)


def test_without_extensions_it_travels_as_it_always_did() -> None:
    made = build_handover(spec(TIS), PLAN, True, extensions={})
    assert type(made) is Handover
    assert made == Handover(spec(TIS), PLAN, prove=True)
    assert b"extensions" not in pickle.dumps(made)
    assert made.ours


def test_extensions_travel_along() -> None:
    extension = WorkerExtension()
    made = build_handover(CorrectionSpec(), PLAN, extensions={"nudge": extension})
    assert isinstance(made, ExtendedHandover)
    assert made.extensions == {"nudge": extension}
    # Without a correction it is the extension that makes the actor train with our loss, and read mu.
    assert made.ours
    assert made.reads_rollout_log_probs


def test_nothing_configured_leaves_verls_loss() -> None:
    made = build_handover(CorrectionSpec(), PLAN, extensions={})
    assert not made.ours
    assert not made.reads_rollout_log_probs
