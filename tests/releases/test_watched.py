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


def has(path: str, text: str) -> bool:
    return f"self.{path}(" in text if "." in path else f"def {path}(self" in text


@pytest.mark.parametrize("trainer", COVERED)
def test_each_trainer_has_each_phase_of_a_step(trainer: str) -> None:
    text = "".join(map(source, TRAINERS[trainer]))
    assert {PHASES[path] for path in PHASES if has(path, text)} == set(PHASES.values())


@pytest.mark.verl(">=0.9.1")
def test_each_phase_is_of_a_trainer() -> None:
    modules = {module for modules in TRAINERS.values() for module in modules}
    text = "".join(map(source, sorted(modules)))
    # What fully_async_policy calls instead of generating.
    assert [path for path in PHASES if not has(path, text)] == ["_get_samples_from_queue"]


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
