"""Check that ``offpolicy.staleness.eta`` governs the run: a covered trainer, and no key of verl that it replaces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import USE_V1, live_path

from ...correction import CorrectionSpec
from ...correction.problem import Problem, set_to
from ...staleness.staleness_settings import ETA, StalenessSettings

ASYNC_MODES = ("separate_async", "colocate_async")
MODE = "trainer.v1.trainer_mode"
SAMPLER = "trainer.v1.sampler"
REPLACED = {
    "num_warmup_batches": 1,
    f"{SAMPLER}.max_off_policy_threshold": 8,
    f"{SAMPLER}.max_off_policy_strategy": "drop",
}
"""Keys of verl that eta takes the place of, the first below the mode's section -> their values in verl's own
configuration, which mean that nobody has set them."""
_SKIP = "skip.rollout_tq.enable"


def is_asynchronous(config: DictConfig) -> bool:
    """Return True if rollouts go on while the trainer updates."""
    return bool(OmegaConf.select(config, USE_V1)) and OmegaConf.select(config, MODE) in ASYNC_MODES


def notes_token_versions(config: DictConfig) -> bool:
    """Return True if the client of the rollout servers notes the version of the weights of each token."""
    return is_asynchronous(config) and live_path(config).attributes.token_versions


def is_bounded(config: DictConfig) -> bool:
    """Return True if eta is set."""
    return StalenessSettings.from_config(config) is not None


def check_staleness(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check what eta needs and what it replaces; nothing where it is null."""
    if not is_bounded(config):
        return
    if (uncovered := _find_uncovered(config)) is not None:
        yield uncovered
        return
    mode = config.trainer.v1.trainer_mode
    for name, usual in REPLACED.items():
        key = name if "." in name else f"trainer.v1.{mode}.{name}"
        value = OmegaConf.select(config, key)
        if value is not None and value != usual:
            reason = f"{ETA} takes its place, and it is not read."
            yield _problem(key, value, reason, f"Set it to null, or {ETA}=null.", set_to(key, usual), config)
    key = f"{SAMPLER}.custom_sampler.name"
    path, name = (OmegaConf.select(config, f"{SAMPLER}.custom_sampler.{each}") for each in ("path", "name"))
    if path and name:
        reason = "the limit has a replay buffer of its own, and this one would not be built."
        yield _problem(key, name, reason, f"Set it to null, or {ETA}=null.", set_to(key, None), config)
    if OmegaConf.select(config, _SKIP, default=False):
        reason = "verl then replays recorded rollouts by whole batches, past the limit."
        yield _problem(_SKIP, True, reason, "Set it to false.", set_to(_SKIP, False), config)


def _find_uncovered(config: DictConfig) -> Problem | None:
    """Find out why the trainer does not issue prompts by the limit."""
    path = live_path(config)
    eta = OmegaConf.select(config, ETA)
    off = set_to(ETA, None)
    if not path.attributes.staleness_limit:
        reason = f"verl {path.release} does not issue prompts as the limit needs it; 0.9.1 does."
        return Problem(ETA, eta, reason, f"Install verl 0.9.1, or set {off}.", parts=(), overrides=(off,))
    if path.trainer != "v1":
        reason, beside = "the V0 trainer samples each batch by the weights in force.", {USE_V1: False}
    elif (mode := config.trainer.v1.trainer_mode) not in ASYNC_MODES:
        reason, beside = "it samples each batch by the weights in force.", {MODE: mode}
    else:
        return None
    fix = f"Set {off}, or {MODE} to one of {', '.join(ASYNC_MODES)}."
    return Problem(ETA, eta, reason, fix, parts=(), overrides=(off,), beside=beside)


def _problem(key: str, value: Any, reason: str, fix: str, override: str, config: DictConfig) -> Problem:
    beside = {ETA: OmegaConf.select(config, ETA)}
    return Problem(key, value, reason, fix, parts=(), overrides=(override,), beside=beside)
