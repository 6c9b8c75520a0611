"""Checks of verl's functions on the live path against their contracts, and of what the release records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from omegaconf import DictConfig

import verl_patches
from verl_patches import (
    engine_loss,
    legacy,
    llm_client,
    replay_buffer,
    router_replay,
    trainer_v0,
    trainer_v1,
    truncated_sampling,
)
from verl_patches.contract import Contract, PatchError
from verl_patches.execution_path import LivePath, live_path

from ...correction import CorrectionSpec
from ...correction.problem import CheckError, Problem, set_to
from ...replay.replay_settings import ReplaySettings
from ...support.support_settings import SupportSettings
from .config_reader import SHADOW, read_shadows
from .contracts_in_source import check_contracts
from .staleness import is_bounded, mixes_unknown_versions, notes_token_versions

Hold = Callable[[Iterable[Contract]], None]
"""Holds contracts against the installed verl; raises PatchError where one does not hold."""


def check_seams(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check every seam of the live path in verl's source: importing verl's workers takes seconds."""
    return _check_seams_of(config, check_contracts)


def demand_seams(config: DictConfig) -> None:
    """Import every seam of the live path and check it, in the process that trains, which imports them anyway.

    Raises:
        CheckError: one does not hold, as where a plugin has replaced what verl's source shows.
    """
    if problems := list(_check_seams_of(config, engine_loss.check)):
        raise CheckError(problems)


def _check_seams_of(config: DictConfig, hold: Hold) -> Iterator[Problem]:
    noted = notes_token_versions(config)
    bounded, replayed = is_bounded(config), ReplaySettings.from_config(config) is not None
    path = live_path(config)
    supported = SupportSettings.from_config(config) is not None and path.attributes.truncated_support
    return check_seams_with(path, hold, bounded=bounded, noted=noted, replayed=replayed, supported=supported)


def check_seams_with(
    path: LivePath,
    hold: Hold,
    *,
    bounded: bool = False,
    noted: bool = False,
    replayed: bool = False,
    supported: bool = False,
) -> Iterator[Problem]:
    """Check the seams of a path by the function ``hold``; those of the legacy actors are always imported.

    Args:
        bounded, noted, replayed, supported: the run has a limit of staleness, notes versions by token, replays routes
            on FSDP or the support of truncated sampling, whose seams are held as well.
    """
    trainer = trainer_v1 if path.trainer == "v1" else trainer_v0
    try:
        verl_patches.status()
        hold(engine_loss.SEAMS)
        hold(trainer.SEAMS)
        if path.trainer == "v0" and path.asynchronous and path.attributes.separate_programs:
            hold(trainer_v0.SEAMS_OF_PROGRAMS)
        if bounded and path.trainer == "v1" and path.attributes.staleness_limit:
            hold(replay_buffer.SEAMS)
        if noted:
            hold(llm_client.SEAMS)
        if replayed:
            hold(router_replay.SEAMS)
        if supported:
            hold(truncated_sampling.SEAMS)
        if path.worker == "legacy":
            legacy.check(path.strategy)
    except PatchError as error:
        yield Problem("verl", path.release, str(error), "")


def check_version_level(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that verl records the weight versions that ``level=version`` reads."""
    where = live_path(config)
    reason = None
    if not where.attributes.weight_versions:
        reason = f"verl {where.release} does not note which version of the weights sampled a row."
    elif mixes_unknown_versions(config):
        reason = (
            f"a row can be sampled by several versions, and which token by which was not shown with {where.release}."
        )
    if reason is None:
        return
    for key in _find_version_levels(spec):
        fix = f"Set {key}=turn or {key}=sequence."
        part = key.removeprefix("correction.").removesuffix(".level")
        yield Problem(key, "version", reason, fix, "ERROR", (part,), (set_to(key, "sequence"),))
    shadows = read_shadows(config)
    left = [name for name, shadow in shadows.items() if "version" not in shadow.levels]
    for name in shadows:
        if name not in left:
            said = f"its level is version, and {reason}"
            override = set_to(SHADOW, left)
            yield Problem(SHADOW, name, said, f"Set {override}.", "ERROR", (f"shadow.{name}",), (override,))


def _find_version_levels(spec: CorrectionSpec) -> Iterator[str]:
    yield from (f"correction.{key}.level" for key, weight in spec.all_weights.items() if weight.level == "version")
    yield from (f"correction.masks.{name}.level" for name, mask in spec.masks if mask.level == "version")
