"""Check of custom agent loops, which may return no log-probs of the rollout engine, so that no mu arrives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ...correction import CorrectionSpec
from ...correction.problem import MU, Problem, set_to
from ..verl_keys.keys import list_active
from .agent_loop_source import LogProbEvidence, find_log_probs
from .config_reader import ROLLOUT, needs_mu
from .module_source import find_source

_FILE = f"{ROLLOUT}.agent.agent_loop_config_path"
_DEFAULT = f"{ROLLOUT}.agent.default_agent_loop"
_MANAGER = f"{ROLLOUT}.agent.agent_loop_manager_class"
_OWN = "recipe.offpolicy.extensions."
"""Managers of extensions, which run verl's loops."""
_VERLS = ("single_turn_agent", "tool_agent")
"""Loops that verl registers itself, which return the log-probs."""
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, YAMLError, OmegaConfBaseException)
_NEEDED = "it has to give AgentLoopOutput(response_logprobs=...), or no mu arrives."


def check_agent_loops(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that rollouts from other agent loops than verl's return log-probs."""
    if not (needs_mu(config, spec) or list_active(config)):
        return
    manager = OmegaConf.select(config, _MANAGER)
    if manager and not str(manager).startswith(_OWN):
        reason = f"rollouts come from a manager of your own, which was not looked at: {_NEEDED}"
        yield Problem(_MANAGER, manager, reason, verdict="NOTE", parts=MU)
        return
    given, default = OmegaConf.select(config, _FILE), OmegaConf.select(config, _DEFAULT)
    targets: dict[str, str] = {}
    if given:
        path = _resolve(str(given))
        if path is None:
            reason = "there is no such file, and every rollout would end in an error."
            fix = "Set the path of the file that names the loops, or null for verl's own."
            yield Problem(_FILE, given, reason, fix, parts=MU)
            return
        try:
            targets = _read_targets(path)
        except _UNREADABLE:
            reason = "not a list of agent loops, each with a name and a _target_, as verl reads it."
            fix = "Write it so: `- {name: mine, _target_: package.module.Class}`."
            yield Problem(_FILE, given, reason, fix, parts=MU)
            return
    if default and default not in (*_VERLS, *targets):
        yield _build_unregistered(config, str(default))
    found = {name: find_log_probs(target) for name, target in targets.items()}
    # Where the default is verl's, the data choose among them.
    used = {default} & set(found) or set(found)
    sure = all(found[name].log_probs == "left out" for name in used)
    for name, each in found.items():
        yield from _check_loop(f"the loop {name} ({targets[name]})", each, given, sure=sure and name in used)


def _resolve(given: str) -> Path | None:
    """Resolve a path as verl does: from the current directory, then from the root of its checkout."""
    package = find_source("verl")
    roots = [Path.cwd(), *([package.parent.parent] if package else [])]
    return next((path for root in roots if (path := root / given).is_file()), None)


def _read_targets(path: Path) -> dict[str, str]:
    """Read the loops of a file: name -> ``_target_``."""
    listed = OmegaConf.load(path)
    if not isinstance(listed, ListConfig):
        raise TypeError(f"{path} holds no list")
    return {str(each["name"]): str(each["_target_"]) for each in listed}


def _build_unregistered(config: DictConfig, default: str) -> Problem:
    reason = f"neither a loop of verl's nor one of {_FILE}"
    elsewhere = os.environ.get("VERL_USE_EXTERNAL_MODULES") or OmegaConf.select(config, "data.custom_cls.path")
    if elsewhere:
        reason = f"{reason}; {elsewhere} may register it, which was not looked at: {_NEEDED}"
        return Problem(_DEFAULT, default, reason, verdict="NOTE", parts=MU)
    fix = f"Name it in the file of {_FILE}, or set {_VERLS[0]}, which runs verl's loop in its place."
    return Problem(_DEFAULT, default, f"{reason}.", fix, parts=MU, overrides=(set_to(_DEFAULT, _VERLS[0]),))


def _check_loop(loop: str, found: LogProbEvidence, given: object, *, sure: bool) -> Iterator[Problem]:
    """Report what the source of a loop shows; ``sure``: rollouts certainly come from it."""
    if found.log_probs == "left out":
        reason = f"{loop} makes its output without response_logprobs ({found.where}): no mu arrives."
        fix = "Give AgentLoopOutput(response_logprobs=...), a log-prob for each token of the response."
        yield Problem(_FILE, given, reason, fix, "NO-OP" if sure else "NOTE", MU)
    elif found.log_probs == "unknown":
        reason = f"whether {loop} returns log-probs is not seen in its source: {_NEEDED}"
        yield Problem(_FILE, given, reason, verdict="NOTE", parts=MU)
