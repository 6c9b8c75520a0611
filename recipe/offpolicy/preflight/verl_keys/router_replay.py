"""Router replay: set where nobody reads it, or at odds with what the rollout records and the trainer computes."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import LivePath

from ...correction import CorrectionSpec
from ...correction.problem import Problem, set_to
from ...correction.proximal import WITHOUT_FORWARD
from .keys import ACTOR, BYPASS, ROLLOUT, VERL, own, value_of

ROUTER_REPLAY = "router_replay"
"""The name under which it is reported, wherever it is set."""
_RECORDED = f"{ROLLOUT}.enable_rollout_routing_replay"
_PARTS = (ROUTER_REPLAY,)


def asked_for(config: DictConfig) -> str | None:
    """What of router replay is asked for anywhere, as ``key=value``."""
    for key in _replay_keys(config):
        if (mode := _mode(config, key)) != "disabled":
            return f"{key}.mode={mode}"
    return f"{_RECORDED}=true" if value_of(config, _RECORDED) else None


def router_replay(config: DictConfig, spec: CorrectionSpec, path: LivePath) -> Iterator[Problem]:
    live = _replay_key(path)
    yield from _unread(config, path, live)
    mode = _mode(config, live) if live else "disabled"
    if mode == "R3" and not value_of(config, _RECORDED):
        yield Problem(
            f"{live}.mode",
            mode,
            "R3 replays the rollout's routes, and the rollout records none.",
            f"Set {_RECORDED}=true, or R2.",
            "WRONG",
            _PARTS,
            (set_to(_RECORDED, True),),
        )
    if mode != "R3" and value_of(config, _RECORDED):
        reason = (
            f"R2 records the trainer's own routes under the same name ({live}.mode=R2)."
            if mode == "R2"
            else "the rollout's routes are replayed by nobody."
        )
        fix = f"Set {live}.mode=R3, or this to false." if live else f"Set it to false: {path} replays no routes."
        override = set_to(f"{live}.mode", "R3", add=True) if live else set_to(_RECORDED, False)
        yield Problem(_RECORDED, True, reason, fix, "WRONG" if mode == "R2" else "INERT", _PARTS, (override,))
    if mode == "R2" and (skips := _skips_the_forward(config, spec)):
        yield Problem(
            f"{live}.mode",
            mode,
            f"R2 records routes in the forward pass for pi_old, and {skips} skips it.",
            "Set R3, correction.proximal=recompute and bypass_mode=false, or disabled.",
            "WRONG",
            _PARTS,
            (set_to(f"{live}.mode", "R3", add=True), set_to(_RECORDED, True)),
        )


def _unread(config: DictConfig, path: LivePath, live: str | None) -> Iterator[Problem]:
    for key in _replay_keys(config):
        if live != key and (mode := _mode(config, key)) != "disabled":
            of_actor = key.startswith(ACTOR)
            reason = f"this is {path}" if of_actor else "of the actor alone routes are replayed"
            fix = f"Set {live}.mode={mode}." if live and of_actor else "Set it to disabled."
            moved = (set_to(f"{live}.mode", mode, add=True),) if live and of_actor else ()
            overrides = (_off(config, key), *moved)
            yield Problem(f"{key}.mode", mode, f"nothing reads it: {reason}.", fix, "INERT", _PARTS, overrides)
        for name in ("record_file", "replay_file"):
            if (value := value_of(config, f"{key}.{name}")) is not None:
                reason = "nothing reads it: routes travel with the batch."
                away = set_to(f"{key}.{name}", None) if key == live or _of_verl(config, key) else _off(config, key)
                yield Problem(f"{key}.{name}", value, reason, "Remove it.", "INERT", _PARTS, (away,))


def _off(config: DictConfig, key: str) -> str:
    """What switches a router replay off that nothing reads."""
    return set_to(f"{key}.mode", "disabled") if _of_verl(config, key) else f"~{key}"


def _of_verl(config: DictConfig, key: str) -> bool:
    """Whether verl's own configuration has it, whose nodes name a class; what a user adds names none."""
    return value_of(config, f"{key}._target_") is not None


def _skips_the_forward(config: DictConfig, spec: CorrectionSpec) -> str | None:
    if spec.proximal in WITHOUT_FORWARD:
        return f"correction.proximal={spec.proximal}"
    return f"{VERL}.bypass_mode=true" if own(config).get(BYPASS) else None


def _replay_key(path: LivePath) -> str | None:
    """The key that decides about router replay on this path, if one does."""
    if path.worker == "legacy":
        return f"{ACTOR}.router_replay" if path.strategy == "megatron" else None
    reads = path.strategy in path.attributes.replaying_engines
    return f"{ACTOR}.{path.strategy}.router_replay" if reads else None


def _replay_keys(config: DictConfig) -> Iterator[str]:
    """Every place below actor and reference that takes a router replay: verl's dataclasses of all engines do."""
    for owner in (ACTOR, "actor_rollout_ref.ref"):
        node = OmegaConf.select(config, owner)
        for name in node or ():
            if name == ROUTER_REPLAY:
                yield f"{owner}.{name}"
            elif isinstance(below := OmegaConf.select(node, str(name)), DictConfig) and ROUTER_REPLAY in below:
                yield f"{owner}.{name}.{ROUTER_REPLAY}"


def _mode(config: DictConfig, key: str) -> str:
    return str(value_of(config, f"{key}.mode") or "disabled")
