"""Arms of the whole runs: each is the quickstart with these keys, and they differ in nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_ACTOR = "actor_rollout_ref.actor"
LAG = 8
FIRST_SEED = 2
"""Seed 1 chose the settings."""

_WHOLE = (
    "trainer.total_training_steps=80",
    "trainer.test_freq=20",
    f"{_ACTOR}.optim.lr=1e-3",
    f"{_ACTOR}.ppo_mini_batch_size=4",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.rollout.dtype=float32",
)
_CONTROL = (
    "trainer.total_training_steps=24",
    f"{_ACTOR}.ppo_mini_batch_size=16",
    "actor_rollout_ref.rollout.dtype=float32",
)
_OPSM = ("correction=opsm", "correction.masks.opsm.delta=0.1")
_BOTH = ("correction=[decoupled_ppo,opsm]", "correction.masks.opsm.delta=0.1")
_LOUD = ("offpolicy.alarms.mismatch_growth.action=off",)


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        name: of the arm.
        overrides: Hydra's, beside ``data.seed``.
        lag: synchronisations by which the engine's weights are late.
        eta: depth of the queue of an asynchronous arm; None: synchronous.
        seeds: number of seeds, from ``FIRST_SEED`` on.
        seconds: that a run takes on two idle cores.
    """

    name: str
    overrides: tuple[str, ...]
    lag: int = 0
    eta: int | None = None
    seeds: int = 8
    seconds: int = 220

    @property
    def steps(self) -> int:
        (found,) = (each for each in self.overrides if each.startswith("trainer.total_training_steps="))
        return int(found.partition("=")[2])


def _build_async(name: str, correction: tuple[str, ...], eta: int) -> Arm:
    queue = (
        "+mode=separate_async_cpu",
        f"trainer.v1.separate_async.num_warmup_batches={eta}",
        f"trainer.v1.sampler.max_off_policy_threshold={eta + 1}",
        "trainer.v1.separate_async.parameter_sync_step=4",
        *_WHOLE,
    )
    return Arm(f"async_{name}_{eta}", (*correction, *queue), eta=eta, seeds=3, seconds=300)


ARMS = (
    Arm("in_step", ("correction=none", *_WHOLE)),
    Arm("late", ("correction=none", *_WHOLE, *_LOUD), LAG),
    Arm("late_opsm", (*_OPSM, *_WHOLE, *_LOUD), LAG),
    Arm("late_decoupled", ("correction=decoupled_ppo", *_WHOLE, *_LOUD), LAG),
    Arm("late_both", (*_BOTH, *_WHOLE, *_LOUD), LAG),
    Arm("control", ("correction=none", *_CONTROL), seeds=5, seconds=110),
    Arm("control_both", (*_BOTH, *_CONTROL), seeds=5, seconds=110),
    *(
        _build_async(name, correction, eta)
        for eta in (0, 2, 8)
        for name, correction in (
            ("bypass", ("correction=bypass",)),
            ("decoupled", ("correction=decoupled_ppo",)),
            ("both", _BOTH),
        )
    ),
)


@dataclass(frozen=True)
class Run:
    """One run: an arm and a seed of the order of the data; vLLM's sampling has none."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm.name}-{self.seed}"


def list_runs() -> Iterator[Run]:
    """List all runs seed by seed, so that what has been run at any time is balanced over the arms."""
    for seed in range(FIRST_SEED, FIRST_SEED + max(arm.seeds for arm in ARMS)):
        yield from (Run(arm, seed) for arm in ARMS if seed < FIRST_SEED + arm.seeds)
