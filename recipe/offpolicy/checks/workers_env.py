"""The environment of Ray's workers, as the launch would put it together."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_patches.contract import PatchError
from verl_patches.runtime_env import KEY, forward

from ..correction import CorrectionSpec
from ..correction.problem import Problem, remove
from ..live_path import LivePath, live_path

_VARIABLES = f"{KEY}.env_vars."


def groups_of(path: LivePath) -> list[str]:
    """The groups of patches that the workers of this path load, asked for or not."""
    return ["legacy"] if path.worker == "legacy" else []


def workers_env(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Variables that the configuration, or the submitted job, sets to another value than this process has."""
    given = OmegaConf.select(config, KEY)
    if given is not None and not isinstance(given, DictConfig):
        yield Problem(KEY, given, "not a mapping, as Ray's runtime environment is.", "", overrides=(f"{KEY}={{}}",))
        return
    tried = OmegaConf.create({})
    if given is not None:
        OmegaConf.update(tried, KEY, OmegaConf.to_container(given, resolve=True), force_add=True)
    try:
        forward(tried, groups_of(live_path(config)))
    except PatchError as error:
        yield _told(str(error))


def _told(message: str) -> Problem:
    """A contradiction by the key that its message begins with; one with a submitted job has no key."""
    said, _, reason = message.partition(": ")
    key, _, value = said.partition("=")
    if not key.startswith(_VARIABLES):
        return Problem("", None, message, "")
    reason, _, fix = reason.partition(" Fix: ")
    return Problem(key, value, reason, f"{fix[:1].upper()}{fix[1:]}", overrides=remove(key, value))
