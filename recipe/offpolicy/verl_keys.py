"""Keys of verl that look like corrections and that the installed release does not read where they are set.

verl keeps two copies of some settings and reads one of them, by release and by worker; the other is ignored without a
word. Read from the sources of 0.7.1, 0.8.0 and 0.9.1:

* ``algorithm.rollout_correction`` with ``bypass_mode``: the trainer puts mu in pi_old's place. Weights, rejections and
  ``loss_type`` are left to the worker, and are not there: the V0 trainer edits ``actor.policy_loss`` after the workers
  have got their copy, the V1 trainer does not edit it.
* ``actor.policy_loss.rollout_correction``: read by the loss ``bypass_mode`` alone.
* ``rollout.calculate_log_probs``, false by default up to 0.8.0: without it the trainer skips its correction.
* ``actor.use_rollout_log_probs``: read by the legacy FSDP actor of 0.7.1 alone.
* ``actor.router_replay``: read by the legacy Megatron actor of 0.7.1 alone. Engines read the key of that name below
  ``actor.megatron`` and ``actor.veomni``; FSDP replays nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

from .correction import CorrectionSpec
from .correction.dialects.verl import VERL_DEFAULTS as DEFAULTS
from .correction.proximal import WITHOUT_FORWARD
from .live_path import LivePath

Finding = tuple[str, object, str, str]
"""Key, value, reason and fix."""

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_VERL = "algorithm.rollout_correction"
_WORKERS = f"{_ACTOR}.policy_loss.rollout_correction"
_LOSS_MODE = f"{_ACTOR}.policy_loss.loss_mode"
_TRAINER_MODE = "trainer.v1.trainer_mode"
_BYPASS = "bypass_mode"

OBSOLETE = {
    "rollout_is_threshold_lower": "rollout_is_threshold='lower_upper', a string, which verl >= 0.8 reads",
    "rollout_rs_threshold_lower": "rollout_rs_threshold='lower_upper', a string",
    "rollout_token_veto_threshold": "a mask of ours, such as correction=outlier",
    "use_policy_gradient": "loss_type=reinforce",
}
"""Names of verl 0.6 and 0.7.0 -> what says the same now."""

UNREAD = {
    "loss_type": (_BYPASS, "verl reads it in bypass mode alone."),
    "rollout_is_threshold": ("rollout_is", "there is no weight to bound."),
    "rollout_is_batch_normalize": ("rollout_is", "there is no weight to normalise."),
    "rollout_rs_threshold": ("rollout_rs", "there is no rejection to bound."),
}
"""Keys of verl's correction -> the key without which nothing reads them, and why."""

FORMER = {
    "algorithm.rollout_is": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_is_threshold": "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_is_threshold_lower": "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_is_level": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_is_mode": "algorithm.rollout_correction.rollout_is or rollout_rs",
    "algorithm.rollout_is_veto_threshold": "algorithm.rollout_correction.rollout_rs",
    f"{_ACTOR}.tis_imp_ratio_cap": "algorithm.rollout_correction.rollout_is_threshold",
}
"""Keys of verl before 0.6 -> where they have gone."""


def dead_keys(config: DictConfig, spec: CorrectionSpec, path: LivePath) -> Iterator[Finding]:
    """What is set and would do nothing on this path, or something else than it says.

    Args:
        config: composed and complete.
        spec: our own correction. With one, all of verl's own is refused elsewhere, and so is its loss.
        path: the release, trainer and worker that will run.
    """
    yield from _trainer_mode(config, path)
    yield from _former_names(config, spec)
    yield from _correction_of_verl(config, spec, path)
    yield from _bypass(config, spec, path)
    yield from _bypass_loss(config, spec)
    yield from _mu_in_the_legacy_actor(config, path)
    yield from _router_replay(config, spec, path)


def _trainer_mode(config: DictConfig, path: LivePath) -> Iterator[Finding]:
    mode = _value(config, _TRAINER_MODE)
    if path.trainer == "v0" and mode not in (None, "sync"):
        yield (
            _TRAINER_MODE,
            mode,
            f"this is {path}, which is synchronous and reads no mode.",
            "Set trainer.use_v1=true.",
        )


def _former_names(config: DictConfig, spec: CorrectionSpec) -> Iterator[Finding]:
    for key in _own(config) if spec.is_none else ():
        if key not in DEFAULTS and key != "_target_":
            now = OBSOLETE.get(key)
            fix = f"In its place: {now}." if now else f"verl reads {', '.join(DEFAULTS)}."
            yield f"{_VERL}.{key}", _own(config)[key], "verl reads no key of this name any more.", fix
    for key, now in FORMER.items():
        if (value := _value(config, key)) is not None:
            yield key, value, "verl reads no key of this name any more.", f"In its place: {now}."


def _correction_of_verl(config: DictConfig, spec: CorrectionSpec, path: LivePath) -> Iterator[Finding]:
    """verl's own correction, when ours is off: whether its keys are said so that they act, and get mu."""
    if not spec.is_none or not (own := _changes(config)):
        return
    for key, (needed, because) in UNREAD.items():
        if key in own and own.get(needed) is None:
            yield f"{_VERL}.{key}", own[key], because, f"Set {_VERL}.{needed}, or leave this out."
    if "rollout_is" in own and own.get("rollout_is_threshold", 2.0) is None:
        reason = f"without a threshold verl leaves out the weight that rollout_is={own['rollout_is']} asks for."
        yield f"{_VERL}.rollout_is_threshold", None, reason, "Set it to 2.0."
    threshold = own.get("rollout_is_threshold")
    if _release(path) < Version("0.8") and isinstance(threshold, str):
        yield (
            f"{_VERL}.rollout_is_threshold",
            threshold,
            f"verl {path.release} takes one number, the cap; a pair of bounds came with 0.8.",
            "Set one number, or correction=icepop with its lower and upper.",
        )
    key = f"{_ROLLOUT}.calculate_log_probs"
    if not _value(config, key):
        yield (
            key,
            _value(config, key),
            f"without the engine's log-probs verl skips its correction, {', '.join(own)}, without a word.",
            "Set it to true.",
        )


def _bypass(config: DictConfig, spec: CorrectionSpec, path: LivePath) -> Iterator[Finding]:
    """What bypass mode leaves to the worker has to be in the worker's own keys."""
    own = _own(config)
    if not spec.is_none or not own.get(_BYPASS):
        return
    asked = {key: value for key, value in _changes(config).items() if key in DEFAULTS and key != _BYPASS}
    held = _workers_own(config)
    if _value(config, _LOSS_MODE) != _BYPASS:
        why = (
            "the trainer writes it to actor.policy_loss after the workers have got their copy"
            if path.trainer == "v0"
            else "the V1 trainer hands it to no worker"
        )
        for key, value in asked.items():
            yield (
                f"{_VERL}.{key}",
                value,
                f"in bypass mode the worker applies it, and {why}: the loss stays "
                f"{_value(config, _LOSS_MODE)} around mu.",
                f"Take it from {_VERL} and set correction=bypass with a weight or mask, or one of "
                f"correction=verl_bypass_*, which are proved live.",
            )
        return
    for key in DEFAULTS:
        if key != _BYPASS and own.get(key, DEFAULTS[key]) != held[key]:
            yield (
                f"{_VERL}.{key}",
                own.get(key, DEFAULTS[key]),
                f"in bypass mode the worker applies its own {_WORKERS}.{key}, which is {_spelt(held[key])}.",
                f"Set +{_WORKERS}.{key}={_spelt(own.get(key, DEFAULTS[key]))}, or one of correction=verl_bypass_* "
                f"without {_VERL}.",
            )


def _bypass_loss(config: DictConfig, spec: CorrectionSpec) -> Iterator[Finding]:
    """The worker's loss of bypass mode, and the keys that it alone reads."""
    mode = _value(config, _LOSS_MODE)
    if spec.is_none and mode == _BYPASS and not _own(config).get(_BYPASS):
        yield (
            _LOSS_MODE,
            mode,
            f"this loss takes pi_old for mu, and {_VERL}.bypass_mode=false recomputes pi_old: its ratios are pi / "
            f"pi_old, and the mismatch is not corrected.",
            f"Set {_VERL}.bypass_mode=true, or correction=bypass with loss_mode=vanilla.",
        )
    node = OmegaConf.select(config, _WORKERS)
    if node is not None and mode != _BYPASS:
        yield (
            _WORKERS,
            _plain(node),
            f"the loss {_BYPASS} alone reads it, and {_LOSS_MODE} is {mode}.",
            f"Remove it, or set {_LOSS_MODE}={_BYPASS} and {_VERL}.bypass_mode=true.",
        )


def _mu_in_the_legacy_actor(config: DictConfig, path: LivePath) -> Iterator[Finding]:
    key = f"{_ACTOR}.use_rollout_log_probs"
    reads = path.worker == "legacy" and path.strategy in ("fsdp", "fsdp2")
    if _value(config, key) and not reads:
        yield (
            key,
            True,
            f"the legacy FSDP actor of verl 0.7.1 alone reads it, and this is {path}.",
            "Remove it; for mu in pi_old's place set correction=bypass.",
        )
    actor = config.actor_rollout_ref.actor
    one_step = actor.ppo_mini_batch_size >= config.data.train_batch_size and actor.ppo_epochs == 1
    if reads and one_step and _own(config).get(_BYPASS) and not _value(config, key):
        yield (
            f"{_VERL}.bypass_mode",
            True,
            "with one gradient step a batch the legacy actor takes the current policy for pi_old, and mu is lost.",
            f"Set +{key}=true, or correction=bypass without {_VERL}.",
        )


def _router_replay(config: DictConfig, spec: CorrectionSpec, path: LivePath) -> Iterator[Finding]:
    live = _replay_key(path)
    for key in _replay_keys(config):
        if live != key and (mode := _mode(config, key)) != "disabled":
            of_actor = key.startswith(_ACTOR)
            reason = f"this is {path}" if of_actor else "of the actor alone routes are replayed"
            fix = f"Set {live}.mode={mode}." if live and of_actor else "Set it to disabled."
            yield f"{key}.mode", mode, f"nothing reads it: {reason}.", fix
        for name in ("record_file", "replay_file"):
            if (value := _value(config, f"{key}.{name}")) is not None:
                yield f"{key}.{name}", value, "nothing reads it: routes travel with the batch.", "Remove it."
    mode = _mode(config, live) if live else "disabled"
    recorded = f"{_ROLLOUT}.enable_rollout_routing_replay"
    if mode == "R3" and not _value(config, recorded):
        yield (
            f"{live}.mode",
            mode,
            "R3 replays the rollout's routes, and the rollout records none.",
            f"Set {recorded}=true, or R2.",
        )
    if mode != "R3" and _value(config, recorded):
        reason = (
            f"R2 records the trainer's own routes under the same name ({live}.mode=R2)."
            if mode == "R2"
            else "the rollout's routes are replayed by nobody."
        )
        fix = f"Set {live}.mode=R3, or this to false." if live else f"Set it to false: {path} replays no routes."
        yield recorded, True, reason, fix
    if mode == "R2" and (skips := _skips_the_forward(config, spec)):
        yield (
            f"{live}.mode",
            mode,
            f"R2 records routes in the forward pass for pi_old, and {skips} skips it.",
            "Set R3, correction.proximal=recompute and bypass_mode=false, or disabled.",
        )


def _skips_the_forward(config: DictConfig, spec: CorrectionSpec) -> str | None:
    if spec.proximal in WITHOUT_FORWARD:
        return f"correction.proximal={spec.proximal}"
    return f"{_VERL}.bypass_mode=true" if _own(config).get(_BYPASS) else None


def _replay_key(path: LivePath) -> str | None:
    """The key that decides about router replay on this path, if one does."""
    if path.worker == "legacy":
        return f"{_ACTOR}.router_replay" if path.strategy == "megatron" else None
    engines = ("megatron",) if _release(path) < Version("0.8") else ("megatron", "veomni")
    return f"{_ACTOR}.{path.strategy}.router_replay" if path.strategy in engines else None


def _replay_keys(config: DictConfig) -> Iterator[str]:
    """Every place below actor and reference that takes a router replay: verl's dataclasses of all engines do."""
    for owner in (_ACTOR, "actor_rollout_ref.ref"):
        node = OmegaConf.select(config, owner)
        for name in node or ():
            if name == "router_replay":
                yield f"{owner}.{name}"
            elif isinstance(below := OmegaConf.select(node, str(name)), DictConfig) and "router_replay" in below:
                yield f"{owner}.{name}.router_replay"


def _mode(config: DictConfig, key: str) -> str:
    return str(_value(config, f"{key}.mode") or "disabled")


def _release(path: LivePath) -> Version:
    return Version(Version(path.release).base_version)


def _own(config: DictConfig) -> dict[str, Any]:
    return _plain(OmegaConf.select(config, _VERL))


def _changes(config: DictConfig) -> dict[str, Any]:
    return {k: v for k, v in _own(config).items() if k != "_target_" and (k not in DEFAULTS or v != DEFAULTS[k])}


def _workers_own(config: DictConfig) -> dict[str, Any]:
    """What the loss of bypass mode reads: where the key is left out, verl's dataclass, which differs from its YAML."""
    node = OmegaConf.select(config, _WORKERS)
    typed = {"rollout_is": "sequence"} if node is None or "_target_" in node else {}
    return {**DEFAULTS, **typed, **_plain(node)}


def _plain(node: Any) -> dict[str, Any]:
    values = OmegaConf.to_container(node, resolve=True) if node is not None else {}
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def _value(config: DictConfig, key: str) -> Any:
    return OmegaConf.select(config, key, default=None)


def _spelt(value: object) -> str:
    """As Hydra spells it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
