"""Checks of what routing replay goes together with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import live_path

from ...correction import CorrectionSpec
from ...correction.problem import Problem, set_to
from ...correction.requirement import find_unmet
from ...replay.obstacles import list_requirements
from ...replay.replay_settings import MEGATRON_ROUTER_REPLAY, ROUTER_REPLAY, ReplaySettings
from ..model_config import find_experts
from ..old_log_prob import count_gradient_steps
from ..verl_keys.router_replay import ROUTER_REPLAY as PART
from .gradient_steps import build_two_steps

_MODE = f"{ROUTER_REPLAY}.mode"
_MEGATRON_PACKS = "actor_rollout_ref.actor.megatron.use_remove_padding"
WITHOUT_REPLAY = "offpolicy.record.without_replay"


def check_routing_replay(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check what hides a model's routers, or what leaves replay without effect; nothing where FSDP replays nothing."""
    if (settings := ReplaySettings.from_config(config)) is None:
        return
    off = set_to(_MODE, "disabled")
    read = partial(OmegaConf.select, config)
    yield from find_unmet(list_requirements(settings.mode), read, off, (PART,), {_MODE: settings.mode})
    if (found := find_experts(config)) is not None and not found[0]:
        reason = f"the model has no experts: {found[1]}."
        yield Problem(_MODE, settings.mode, reason, f"Set {off}.", "ERROR", (PART,), _turn_off(config, settings))
    elif count_gradient_steps(config) == 1:
        reason = "a batch gets one gradient step, within which nothing drifts: replay would bias it for nothing."
        smaller = "actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size, which changes training"
        fix = f"Set {smaller}, or {off}."
        yield Problem(_MODE, settings.mode, reason, fix, "NO-OP", (PART,), build_two_steps(config))


def check_megatron_replay(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that verl's Megatron engine lays routes out as it does tokens: it packs routes whatever tokens are."""
    path = live_path(config)
    mode = OmegaConf.select(config, f"{MEGATRON_ROUTER_REPLAY}.mode")
    if path.strategy != "megatron" or not path.attributes.watched_replay or mode in (None, "disabled"):
        return
    if OmegaConf.select(config, _MEGATRON_PACKS) is False:
        mend = set_to(_MEGATRON_PACKS, True)
        reason = "routes are packed and tokens padded, so that routes go to other tokens than they are of."
        fix = f"Set {mend}, or {set_to(f'{MEGATRON_ROUTER_REPLAY}.mode', 'disabled')}."
        beside = {f"{MEGATRON_ROUTER_REPLAY}.mode": mode}
        yield Problem(_MEGATRON_PACKS, False, reason, fix, "ERROR", (PART,), (mend,), beside)


def check_recorded_without_replay(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that ``offpolicy.record.without_replay`` has a pi_old by replayed routes to stand beside."""
    if OmegaConf.select(config, WITHOUT_REPLAY) is not True:
        return
    settings = ReplaySettings.from_config(config)
    off = set_to(WITHOUT_REPLAY, False)
    if settings is None or settings.mode != "R3":
        beside = {_MODE: OmegaConf.select(config, _MODE)}
        reason = "pi_old is computed without replay already: R3 on FSDP alone replays routes there."
        yield Problem(WITHOUT_REPLAY, True, reason, f"Set {off}.", parts=(), overrides=(off,), beside=beside)
    elif spec.proximal != "recompute":
        beside = {"correction.proximal": spec.proximal}
        reason = "there is no pi_old by replayed routes, which it is compared with."
        fix = f"Set correction.proximal=recompute, or {off}."
        yield Problem(WITHOUT_REPLAY, True, reason, fix, parts=(), overrides=(off,), beside=beside)


def _turn_off(config: DictConfig, settings: ReplaySettings) -> tuple[str, ...]:
    recorded = set_to("actor_rollout_ref.rollout.enable_rollout_routing_replay", False)
    return (set_to(_MODE, "disabled"), *([recorded] if settings.mode == "R3" else []))
