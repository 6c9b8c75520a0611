"""Settings of verl's that replay does not go together with."""

from __future__ import annotations

from recipe.offpolicy.replay.batch_routes import list_requirements


def test_the_trainers_own_routes_come_from_no_engine() -> None:
    of_engine = set(list_requirements("R3")) - set(list_requirements("R2"))
    assert [row.key for row in of_engine] == ["actor_rollout_ref.rollout.name"]
