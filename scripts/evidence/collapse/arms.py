"""The runs of the plan: whole runs, which differ from the quickstart only in the given keys, and in-process runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from seeds import Planned

_ACTOR = "actor_rollout_ref.actor"
OPTIONS = Path(__file__).resolve().parents[3] / "configs" / "correction"
LAG = 8
FIRST_SEED = 2
"""Seed 1 was used to choose the settings."""

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
        name: name of the arm.
        overrides: Hydra overrides, used together with ``data.seed``.
        lag: number of synchronisations by which the engine's weights lag behind.
        eta: queue depth of an asynchronous arm; None for a synchronous arm.
        seeds: number of seeds, starting with ``FIRST_SEED``.
        seconds: duration of a run on two idle cores.
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


@dataclass(frozen=True, kw_only=True)
class Run(Planned):
    """One run of an arm; the seed determines only the order of the data, because vLLM's sampling has no seed."""

    arm: Arm


def list_runs(arms: Sequence[Arm] = ARMS) -> Iterator[Run]:
    """List all runs seed by seed, so that finished runs are spread evenly over the arms at any time."""
    for seed in range(FIRST_SEED, FIRST_SEED + max(arm.seeds for arm in arms)):
        for arm in (arm for arm in arms if seed < FIRST_SEED + arm.seeds):
            details = " ".join(arm.overrides) + f" lag:{arm.lag}" * (arm.lag > 0)
            yield Run(setting=arm.name, seed=seed, seconds=arm.seconds, details=details, arm=arm)


# --- runs in one process

STEPS, EVERY = 80, 20
PROMPTS, ROLLOUTS, MINI_BATCHES, MAX_TOKENS = 16, 8, 4, 10
ETAS, RATES, SEEDS = (0, 1, 2, 4, 8), (1e-3, 3e-4), 10
MANTISSA, ROUNDED = 2, ("none", "decoupled", "opsm", "both")
"""Number of bits to which the sampler's weights are rounded in runs where only its backend differs, and the arms of
these runs."""
SECONDS = 45
"""Duration of a run on one idle core."""


def _read(*names: str) -> dict[str, Any]:
    """Read shipped corrections and merge them, using the delta of the whole runs."""
    merged: dict[str, Any] = {}
    for name in names:
        merged |= yaml.safe_load((OPTIONS / f"{name}.yaml").read_text())
    if "opsm" in names:
        merged["masks"]["opsm"]["delta"] = 0.1
    return merged


IN_PROCESS: dict[str, dict[str, Any]] = {
    "none": {},
    "bypass": _read("bypass"),
    "decoupled": _read("decoupled_ppo"),
    "opsm": _read("opsm"),
    "both": _read("decoupled_ppo", "opsm"),
    "random": _read("opsm"),
}
"""Arm -> its correction; ``random`` drops as many negative rows as OPSM would, but chooses them at random."""


@dataclass(frozen=True, kw_only=True)
class LateRun(Planned):
    """One run in one process; the seed is for the questions, for their order, and for sampling.

    Attributes:
        group: the arm, one of ``IN_PROCESS``.
        eta: number of steps by which the sampler's weights lag behind.
        rate: learning rate.
        rounded: whether the sampler rounds its weights to ``MANTISSA`` bits of mantissa, as an engine with another
            precision would.
    """

    eta: int
    rate: float
    rounded: bool = False


def list_late_runs() -> Iterator[LateRun]:
    """List all runs seed by seed; samplers with rounded weights do not lag behind."""
    settings = [(arm, 0, RATES[0], True) for arm in ROUNDED]
    settings += [(arm, eta, rate, False) for rate in RATES for eta in reversed(ETAS) for arm in IN_PROCESS]
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        for arm, eta, rate, rounded in settings:
            name = f"{arm}-{eta}-{rate:g}" + "-rounded" * rounded
            yield LateRun(setting=name, seed=seed, seconds=SECONDS, group=arm, eta=eta, rate=rate, rounded=rounded)
