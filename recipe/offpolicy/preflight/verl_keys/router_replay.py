"""Checks of router replay: keys that nobody reads, or that contradict what rollout and trainer record."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import LivePath

from ...correction import CorrectionSpec
from ...correction.problem import Problem, set_to
from ...correction.proximal import WITHOUT_FORWARD
from ...replay.replay_settings import ROUTER_REPLAY as FSDP_ROUTER_REPLAY
from ...replay.replay_settings import replays_on_fsdp
from .keys import ACTOR, BYPASS, ROLLOUT, VERL, get_value, read_rollout_correction

ROUTER_REPLAY = "router_replay"
"""The name under which it is reported, wherever it is set."""
_RECORDED = f"{ROLLOUT}.enable_rollout_routing_replay"
_PARTS = (ROUTER_REPLAY,)


def find_router_replay(config: DictConfig) -> str | None:
    """Find the first key that asks for router replay, as ``key=value``; None if none does."""
    for key in _list_replay_keys(config):
        if (mode := _get_mode(config, key)) != "disabled":
            return f"{key}.mode={mode}"
    return f"{_RECORDED}=true" if get_value(config, _RECORDED) else None


def check_router_replay(config: DictConfig, spec: CorrectionSpec, path: LivePath) -> Iterator[Problem]:
    """Check that routes which are replayed are recorded, and the reverse."""
    live = _find_replay_key(config, path)
    yield from _find_unread(config, path, live)
    mode = _get_mode(config, live) if live else "disabled"
    if mode == "R3" and not get_value(config, _RECORDED):
        reason, fix = "R3 replays the rollout's routes, and the rollout records none.", f"Set {_RECORDED}=true, or R2."
        yield Problem(f"{live}.mode", mode, reason, fix, "ERROR", _PARTS, (set_to(_RECORDED, True),))
    if mode != "R3" and get_value(config, _RECORDED):
        reason = (
            f"R2 records the trainer's own routes under the same name ({live}.mode=R2)."
            if mode == "R2"
            else "nothing replays the rollout's routes."
        )
        fix = f"Set {live}.mode=R3, or this to false." if live else f"Set it to false: {path} replays no routes."
        mend = (set_to(f"{live}.mode", "R3", add=True),) if live else ()
        yield Problem(_RECORDED, True, reason, fix, "ERROR" if mode == "R2" else "NO-OP", _PARTS, mend)
    if mode == "R2" and (skips := _find_skipped_forward(config, spec)):
        reason = f"R2 records routes in the forward pass for pi_old, and {skips} skips it."
        fix = "Set R3, correction.proximal=recompute and bypass_mode=false, or disabled."
        overrides = (set_to(f"{live}.mode", "R3", add=True), set_to(_RECORDED, True))
        yield Problem(f"{live}.mode", mode, reason, fix, "ERROR", _PARTS, overrides)


def _find_unread(config: DictConfig, path: LivePath, live: str | None) -> Iterator[Problem]:
    for key in _list_replay_keys(config):
        if live != key and (mode := _get_mode(config, key)) != "disabled":
            of_actor = key.startswith(ACTOR)
            reason = f"this is {path}" if of_actor else "of the actor alone routes are replayed"
            fix = f"Set {live}.mode={mode}." if live and of_actor else "Set it to disabled to go without it."
            moved = (_build_off(config, key), set_to(f"{live}.mode", mode, add=True))
            overrides = moved if live and of_actor else ()
            yield Problem(f"{key}.mode", mode, f"nothing reads it: {reason}.", fix, "NO-OP", _PARTS, overrides)
        for name in ("record_file", "replay_file"):
            if (value := get_value(config, f"{key}.{name}")) is not None:
                reason = "nothing reads it: routes travel with the batch."
                yield Problem(f"{key}.{name}", value, reason, "", "NO-OP", _PARTS)


def _build_off(config: DictConfig, key: str) -> str:
    """Build the override that switches off a router replay which nothing reads."""
    return set_to(f"{key}.mode", "disabled") if _is_of_verl(config, key) else f"~{key}"


def _is_of_verl(config: DictConfig, key: str) -> bool:
    """Return True if the node is in verl's configuration, where nodes name a class; those a user adds do not."""
    return get_value(config, f"{key}._target_") is not None


def _find_skipped_forward(config: DictConfig, spec: CorrectionSpec) -> str | None:
    if spec.proximal in (*WITHOUT_FORWARD, "same_engine"):
        return f"correction.proximal={spec.proximal}"
    return f"{VERL}.bypass_mode=true" if read_rollout_correction(config).get(BYPASS) else None


def _find_replay_key(config: DictConfig, path: LivePath) -> str | None:
    """Find the key that decides about router replay on this path; None if none does."""
    if path.worker == "legacy":
        return f"{ACTOR}.router_replay" if path.strategy == "megatron" else None
    if replays_on_fsdp(path) and OmegaConf.select(config, "offpolicy") is not None:  # our trainer runs
        return FSDP_ROUTER_REPLAY
    reads = path.strategy in path.attributes.replaying_engines
    return f"{ACTOR}.{path.strategy}.router_replay" if reads else None


def _list_replay_keys(config: DictConfig) -> Iterator[str]:
    """List every section below actor and reference that takes a router replay."""
    for owner in (ACTOR, "actor_rollout_ref.ref"):
        node = OmegaConf.select(config, owner)
        for name in node or ():
            if name == ROUTER_REPLAY:
                yield f"{owner}.{name}"
            elif isinstance(below := OmegaConf.select(node, str(name)), DictConfig) and ROUTER_REPLAY in below:
                yield f"{owner}.{name}.{ROUTER_REPLAY}"


def _get_mode(config: DictConfig, key: str) -> str:
    return str(get_value(config, f"{key}.mode") or "disabled")
