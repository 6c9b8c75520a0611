"""Check of the environment variables of Ray's workers, as the launch would set them."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import LivePath, live_path
from verl_patches.runtime_env import KEY, ContradictionError, forward

from ...correction import CorrectionSpec
from ...correction.problem import Problem


def list_patch_groups(path: LivePath) -> list[str]:
    """List the groups of patches that the workers of this path load."""
    return ["legacy"] if path.worker == "legacy" else []


def check_workers_env(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Find variables that the configuration or the submitted job sets to other values than this process has."""
    given = OmegaConf.select(config, KEY)
    if given is not None and not isinstance(given, DictConfig):
        yield Problem(KEY, given, "not a mapping, as Ray's runtime environment is.", "", overrides=(f"{KEY}={{}}",))
        return
    tried = OmegaConf.create({})
    if given is not None:
        OmegaConf.update(tried, KEY, OmegaConf.to_container(given, resolve=True), force_add=True)
    try:
        forward(tried, list_patch_groups(live_path(config)))
    except ContradictionError as error:
        if error.key:
            yield Problem(error.key, error.value, error.reason, error.fix)
        else:
            yield Problem("", None, str(error))
