"""An update by workers that belong to no corrected trainer is refused, wherever a copy of them goes."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.worker.verl_workers import GuardedUpdate, adopt


def verls(batch: int) -> int:
    return 10 * batch


def test_an_update_is_refused_until_it_is_adopted_and_in_every_copy() -> None:
    group = SimpleNamespace(update_actor=GuardedUpdate(verls))
    with pytest.raises(LivenessError, match="belong to no corrected trainer"):
        group.update_actor(3)
    adopt(group, lambda original, batch: original(batch) + 1)
    assert group.update_actor(3) == 31
    with pytest.raises(LivenessError):
        pickle.loads(pickle.dumps(group.update_actor))(3)
    # A trainer that is made again adopts verl's own method, not a former trainer's.
    adopt(group, lambda original, batch: original(batch) + 2)
    assert group.update_actor(3) == 32


def test_groups_of_verl_refuse_updates_under_each_name_that_they_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_group = pytest.importorskip("verl.single_controller.base.worker_group")
    from recipe.offpolicy.worker.verl_workers import guard_groups

    def bind(self: SimpleNamespace, names: tuple[str, ...]) -> list[str]:
        for name in names:
            setattr(self, name, verls)
        return list(names)

    monkeypatch.setattr(worker_group.WorkerGroup, "_bind_worker_method", bind)
    guard_groups()
    guard_groups()
    group = SimpleNamespace()
    # Colocated workers have their methods behind the name of each role.
    worker_group.WorkerGroup._bind_worker_method(
        group, ("actor_rollout_update_actor", "update_actor", "compute_log_prob")
    )
    assert isinstance(group.update_actor, GuardedUpdate)
    assert group.update_actor.verls is verls
    assert isinstance(group.actor_rollout_update_actor, GuardedUpdate)
    assert group.compute_log_prob is verls
