"""Checks of verl's bypass mode, whose weights and rejections must be set in the worker's own keys."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import LivePath, count_prompts

from ...correction import CorrectionSpec
from ...correction.problem import Problem, format_value, set_to
from .keys import (
    ACTOR,
    BYPASS,
    DEFAULTS,
    LOSS_MODE,
    VERL,
    WORKERS,
    find_changed_keys,
    get_value,
    name_part,
    read_rollout_correction,
    read_workers_copy,
    to_plain,
)

_BYPASS = f"{VERL}.{BYPASS}"


def check_bypass(config: DictConfig, spec: CorrectionSpec, path: LivePath) -> Iterator[Problem]:
    """Check weights, rejections and the loss type beside ``bypass_mode``."""
    asked_of = read_rollout_correction(config)
    if not spec.is_none or not asked_of.get(BYPASS):
        return
    asked = {key: value for key, value in find_changed_keys(config).items() if key in DEFAULTS and key != BYPASS}
    held = read_workers_copy(config)
    if get_value(config, LOSS_MODE) != BYPASS:
        why = (
            "the trainer writes it to actor.policy_loss after the workers have got their copy"
            if path.trainer == "v0"
            else "the V1 trainer hands it to no worker"
        )
        into_the_worker = _build_worker_overrides(asked_of, {**DEFAULTS, **to_plain(OmegaConf.select(config, WORKERS))})
        loss = get_value(config, LOSS_MODE)
        reason = f"in bypass mode the worker applies it, and {why}: the loss stays {loss} around mu."
        ours = "set correction=bypass with a weight or mask, or one of correction=verl/bypass_*, which are proved live"
        fix = f"Take it from {VERL} and {ours}."
        for key, value in asked.items():
            parts = (name_part(_find_owner(key)),)
            yield Problem(f"{VERL}.{key}", value, reason, fix, "NO-OP", parts, into_the_worker)
        return
    for key in DEFAULTS:
        if key != BYPASS and (value := asked_of.get(key, DEFAULTS[key])) != held[key]:
            at, parts = f"{WORKERS}.{key}", (name_part(_find_owner(key)),)
            reason = f"in bypass mode the worker applies its own {at}, which is {format_value(held[key])}."
            fix = f"Set +{at}={format_value(value)}, or one of correction=verl/bypass_* without {VERL}."
            yield Problem(f"{VERL}.{key}", value, reason, fix, "ERROR", parts, (set_to(at, value, add=True),))


def _find_owner(key: str) -> str:
    """Return the part that a key belongs to: its bounds and normalisation belong to the weight or the rejection."""
    return next((name for name in ("rollout_is", "rollout_rs") if key.startswith(name)), key)


def _build_worker_overrides(asked: dict[str, object], held: dict[str, object]) -> tuple[str, ...]:
    """Build overrides that set the worker's copy to the same values, under the loss that reads it."""
    said = {key: asked.get(key, default) for key, default in DEFAULTS.items() if key != BYPASS}
    differing = {key: value for key, value in said.items() if value != held[key]} or {"loss_type": said["loss_type"]}
    return (
        set_to(LOSS_MODE, BYPASS),
        *(set_to(f"{WORKERS}.{key}", value, add=True) for key, value in differing.items()),
    )


def check_bypass_loss(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check the worker's loss of bypass mode, and the keys that it alone reads."""
    mode = get_value(config, LOSS_MODE)
    if spec.is_none and mode == BYPASS and not read_rollout_correction(config).get(BYPASS):
        reason = (
            f"this loss takes pi_old for mu, and {_BYPASS}=false recomputes pi_old: its ratios are pi / pi_old, and "
            f"the mismatch is not corrected."
        )
        fix = f"Set {_BYPASS}=true, or correction=bypass with loss_mode=vanilla."
        yield Problem(LOSS_MODE, mode, reason, fix, "ERROR", (LOSS_MODE,), (set_to(_BYPASS, True),))
    node = OmegaConf.select(config, WORKERS)
    if node is not None and mode != BYPASS:
        reason = f"the loss {BYPASS} alone reads it, and {LOSS_MODE} is {mode}."
        fix = f"Remove it, or set {LOSS_MODE}={BYPASS} and {_BYPASS}=true."
        yield Problem(WORKERS, to_plain(node), reason, fix, "NO-OP", (WORKERS,))


def check_legacy_mu(config: DictConfig, path: LivePath) -> Iterator[Problem]:
    """Check ``actor.use_rollout_log_probs``, which the legacy FSDP actor alone reads and needs to get mu."""
    key = f"{ACTOR}.use_rollout_log_probs"
    reads = path.worker == "legacy" and path.strategy in ("fsdp", "fsdp2")
    if get_value(config, key) and not reads and not path.asynchronous:  # whose own configurations set it
        reason = f"the legacy FSDP actor of verl 0.7.1 alone reads it, and this is {path}."
        fix = f"Set {key}=false; for mu in pi_old's place set correction=bypass."
        yield Problem(key, True, reason, fix, "NO-OP", (key,))
    actor = config.actor_rollout_ref.actor
    one_step = actor.ppo_mini_batch_size >= count_prompts(config) and actor.ppo_epochs == 1
    if reads and one_step and read_rollout_correction(config).get(BYPASS) and not get_value(config, key):
        reason = "with one gradient step a batch the legacy actor takes the current policy for pi_old, and mu is lost."
        fix, override = f"Set +{key}=true, or correction=bypass without {VERL}.", set_to(key, True, add=True)
        yield Problem(_BYPASS, True, reason, fix, "NO-OP", (name_part(BYPASS),), (override,))
