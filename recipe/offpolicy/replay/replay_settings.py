"""Keys of routing replay (verl's own and ``offpolicy.replay``), and settings that are incompatible with replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast, get_args

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import LivePath, live_path

from ..batch.declared_keys import Section, count, read_shipped_defaults
from ..correction import Problem
from ..correction.problem import Requirement
from .batch_routes import Mode

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_REFERENCE = "the reference is the same engine without its adapter, and would replay too."
_SPLIT = "routes are not split over sequence-parallel ranks."
_OF_ANY_MODE = (
    Requirement(f"{_MODEL}.use_fused_kernels", (False,), "fused kernels replace the model's forward."),
    Requirement(f"{_MODEL}.mtp.enable", (False,), "layers that predict further tokens choose experts themselves."),
    Requirement(f"{_MODEL}.lora_rank", (0,), _REFERENCE),
    Requirement(f"{_MODEL}.lora.rank", (0,), _REFERENCE),
    Requirement(f"{_MODEL}.lora_adapter_path", (None,), _REFERENCE),
    Requirement(f"{_ACTOR}.ulysses_sequence_parallel_size", (1,), _SPLIT),
    Requirement(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size", (1,), _SPLIT),
)
_OF_R3 = Requirement("actor_rollout_ref.rollout.name", ("vllm",), "R3 is tested only with vLLM's routes.")


def list_requirements(mode: Mode) -> tuple[Requirement, ...]:
    """List the configuration values that replay in this mode needs."""
    return (*_OF_ANY_MODE, _OF_R3) if mode == "R3" else _OF_ANY_MODE


SECTION = "offpolicy.replay"
OLDEST = f"{SECTION}.oldest"
ROUTER_REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay"
MEGATRON_ROUTER_REPLAY = "actor_rollout_ref.actor.megatron.router_replay"
RECORDED = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
STRATEGIES = ("fsdp", "fsdp2")


@dataclass(frozen=True)
class ReplaySettings:
    """Settings of routing replay on FSDP.

    Attributes:
        mode: R2 or R3.
        oldest: age in versions of the weights up to which routes are replayed; None: at any age.
    """

    mode: Mode
    oldest: int | None

    @classmethod
    def from_config(cls, config: DictConfig, path: LivePath | None = None) -> ReplaySettings | None:
        """Read the settings from a checked configuration; None if FSDP replays nothing."""
        mode = OmegaConf.select(config, f"{ROUTER_REPLAY}.mode")
        if mode not in get_args(Mode) or not replays_on_fsdp(path or live_path(config)):
            return None
        return cls(cast(Mode, mode), OmegaConf.select(config, OLDEST))


def replays_on_fsdp(path: LivePath) -> bool:
    """Return True if verl's FSDP replay key takes effect on a path."""
    return path.attributes.fsdp_replay and _is_v1_engine(path, STRATEGIES)


def read_megatron_mode(config: DictConfig, path: LivePath | None = None) -> Mode | None:
    """Read verl's replay mode for Megatron if its routers can be monitored; None otherwise."""
    mode = OmegaConf.select(config, f"{MEGATRON_ROUTER_REPLAY}.mode")
    if mode in (None, "disabled"):
        return None
    path = path or live_path(config)
    return cast(Mode, mode) if path.attributes.watched_replay and _is_v1_engine(path, ("megatron",)) else None


def _is_v1_engine(path: LivePath, strategies: tuple[str, ...]) -> bool:
    return path.trainer == "v1" and path.strategy in strategies


KEYS = Section(
    SECTION,
    read_shipped_defaults("replay"),
    {"oldest": count("a number of versions, 0 or more, or null for all", 0, null=True)},
)


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """Find invalid values of ``offpolicy.replay``."""
    found = list(KEYS.find_problems(config))
    yield from found
    oldest = None if found else OmegaConf.select(config, OLDEST)
    if oldest is not None and ((settings := ReplaySettings.from_config(config)) is None or settings.mode != "R3"):
        reason, fix = f"used only with {ROUTER_REPLAY}.mode=R3.", f"Set {ROUTER_REPLAY}.mode=R3, or {OLDEST}=null."
        yield Problem(OLDEST, oldest, reason, fix, parts=())
