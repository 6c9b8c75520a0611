"""The attributes that the watchdog watches exist in each release's trainers; a name that verl lacks would watch
nothing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from recipe.offpolicy.fault_tolerance.watchdog import HOLDERS, PHASES

_V1 = "verl.trainer.ppo.v1"
TRAINERS = {
    "v0": ["verl.trainer.ppo.ray_trainer"],
    "v1": [f"{_V1}.trainer_base"],
    "separate_async": [f"{_V1}.trainer_base", f"{_V1}.trainer_separate_async"],
}
"""Trainer -> the modules that define it."""
OF_EVERY_STEP = {
    "checkpoint_manager.sleep_replicas",
    "_compute_old_log_prob",
    "_compute_ref_log_prob",
    "_compute_values",
    "_compute_reward_colocate",
    "_update_critic",
    "_update_actor",
    "checkpoint_manager.update_weights",
    "_save_checkpoint",
    "_load_checkpoint",
    "_validate",
}
OF_TRAINER = {
    "v0": {"init_workers", "async_rollout_manager.generate_sequences"},
    "v1": {"_setup", "replay_buffer.sample"},
    "separate_async": {
        "_setup",
        "replay_buffer.sample",
        "replay_buffer.wait_for_sampleable",
        "standalone_checkpoint_manager.update_weights",
    },
}
OWNERS = {
    "workers": ["verl.single_controller.ray.base"],
    # The one that the release has.
    "server_handles": ["verl.workers.rollout.llm_server", "verl.experimental.agent_loop.agent_loop"],
    "agent_loop_workers": ["verl.experimental.agent_loop.agent_loop"],
    "servers": ["verl.workers.rollout.replica"],
    "reward_loop_workers": ["verl.experimental.reward_loop.reward_loop"],
}
"""List of actors -> the modules of the class that contains it; the first module that exists is used."""
NEWER = pytest.mark.verl(">=0.9")
COVERED = [
    "v0",
    pytest.param("v1", marks=NEWER),
    pytest.param("separate_async", marks=pytest.mark.verl(">=0.9.1")),  # not covered before
]


def source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


@pytest.mark.parametrize("trainer", COVERED)
def test_the_phases_of_each_trainer(trainer: str) -> None:
    text = "".join(map(source, TRAINERS[trainer]))
    found = {path for path in PHASES if (f"self.{path}(" if "." in path else f"def {path}(self") in text}
    assert found == OF_EVERY_STEP | OF_TRAINER[trainer]


@pytest.mark.parametrize("trainer", COVERED)
def test_the_actors_of_each_trainer(trainer: str) -> None:
    """The list contains its workers, the rollout's servers and its agent loops, and the attributes in which to find
    them.
    """
    text = "".join(map(source, TRAINERS[trainer]))
    held = set()
    for path in HOLDERS:
        owner, *_, actors = path.split(".")
        module = next(name for name in OWNERS[actors] if importlib.util.find_spec(name))
        if f"self.{owner} = " in text or f"self.{owner}: " in text:
            of_owner = source(module)
            if any(
                makes in of_owner for makes in (f"self.{actors} = [", f"self.{actors}: list[", f"def {actors}(self")
            ):
                held.add(path)
    groups = {"actor_rollout_wg.workers", "critic_wg.workers", "ref_policy_wg.workers"}
    assert groups | {"reward_loop_manager.reward_loop_workers", "checkpoint_manager.replicas.servers"} <= held
    loops = "async_rollout_manager" if trainer == "v0" else "agent_loop_manager"
    assert f"{loops}.agent_loop_workers" in held
    servers = {path for path in held if path.endswith(".server_handles")}
    assert ("standalone_server_manager.server_handles" in servers) is (trainer == "separate_async")
    assert servers & {"llm_server_manager.server_handles", "async_rollout_manager.server_handles"}
