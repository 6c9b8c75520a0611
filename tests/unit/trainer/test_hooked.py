"""A corrected run hooks verl's trainers, has a logger that is shown, and workers that only it updates."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.trainer import hooked
from recipe.offpolicy.worker.verl_workers import GuardedUpdate, adopt

WITHOUT = "import pickle, sys; from omegaconf import OmegaConf; OmegaConf.resolve(pickle.load(sys.stdin.buffer))"


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["", f"import {hooked.MODULE}; "])
def test_a_process_without_the_hooks_cannot_resolve_the_configuration(imports: str) -> None:
    import pickle

    config = OmegaConf.create({"trainer": {"device": "cpu"}})
    hooked.mark(config)
    done = subprocess.run([sys.executable, "-c", imports + WITHOUT], input=pickle.dumps(config), capture_output=True)
    assert (done.returncode == 0) is bool(imports)
    assert (b"offpolicy_hooked" in done.stderr) is not bool(imports)


def test_what_only_samples_is_no_trainer() -> None:
    class FullyAsyncRollouter:
        """verl's class of this name; Ray's actors carry their class by value."""

    class Derived(FullyAsyncRollouter):
        """A fork's."""

    assert not hooked.trains(FullyAsyncRollouter)
    assert not hooked.trains(Derived)
    assert hooked.trains(object)


def test_installing_twice_hooks_once() -> None:
    before = list(sys.meta_path)
    hooked.install()
    assert sys.meta_path == before


SAY = (
    "from recipe.offpolicy.trainer.hooked import logger, set_up_logger\n"
    "set_up_logger(); set_up_logger()\nlogger.info('it is live')\n"
)


def said(setup: str = "", **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", setup + SAY], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_once_where_nobody_set_up_a_logger() -> None:
    assert said().count("it is live") == 1


def verls(batch: int) -> int:
    return 10 * batch


def test_an_update_is_refused_until_it_is_adopted_and_in_every_copy() -> None:
    group = SimpleNamespace(update_actor=GuardedUpdate(verls))
    with pytest.raises(LivenessError, match="do not belong to a corrected trainer"):
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
