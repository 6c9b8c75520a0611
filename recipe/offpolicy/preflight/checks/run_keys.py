"""Checks of keys that verl reads late: after models are loaded, at the first checkpoint or the first update."""

from __future__ import annotations

import ast
import difflib
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...correction import CorrectionSpec, Problem
from ...correction.problem import set_to
from ...correction.spelling import find_closest
from ..verl_keys.estimators import WITHOUT_PI_OLD
from .config_reader import ACTOR, ROLLOUT
from .module_source import find_source

_MODE, _FROM = "trainer.resume_mode", "trainer.resume_from_path"
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
_CHOICES: dict[str, tuple[str, ...]] = {
    _MODE: ("auto", "disable", "resume_path"),
    "algorithm.adv_estimator": (*WITHOUT_PI_OLD, "optimal_token_baseline", "tir_optimal_token_baseline"),
    "algorithm.kl_penalty": (*_KL, *(f"{name}+" for name in _KL)),
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    f"{ACTOR}.kl_loss_type": (*_KL, *(f"{name}+" for name in _KL)),
    "data.truncation": ("error", "left", "right", "middle"),
}
"""Keys of verl -> the choices that it has, the default first."""
_OF_USERS = ("VERL_USE_EXTERNAL_MODULES",)
"""Variables that have verl import modules of the user's, which may register estimators."""
_FOLDERS = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
_LARGEST = 1e30
"""Beyond it products of two float32 are infinite, or soon are."""


def check_engine_is_named(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that the rollout engine is named; verl has no default and ends when its workers are built."""
    key = f"{ROLLOUT}.name"
    if OmegaConf.select(config, key) in (None, ""):
        reason = "no rollout engine is named, and verl has no default."
        yield Problem(key, OmegaConf.select(config, key), reason, parts=(), overrides=(set_to(key, "vllm"),))


def check_choices(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check keys of which verl knows a few values, and the names of loggers."""
    for key, choices in _CHOICES.items():
        value = OmegaConf.select(config, key, default=choices[0])
        if value in choices or (key == "algorithm.adv_estimator" and any(map(os.environ.get, _OF_USERS))):
            continue
        if key == "algorithm.adv_estimator" and not isinstance(value, str):
            continue  # which find_unreadable_values reports
        near = find_closest(str(value), choices) or (choices[0] if key == _MODE else None)
        fix = f"Set one of {', '.join(choices)}."
        overrides = (set_to(key, near),) if near else ()  # any other choice would be another algorithm
        yield Problem(key, value, "verl has no such choice.", fix, parts=(), overrides=overrides)
    known = _list_loggers()
    given = OmegaConf.select(config, "trainer.logger")
    names: list[Any] = list(given) if isinstance(given, ListConfig) else [] if given is None else [given]
    if known and (wrong := [name for name in names if name not in known]):
        fixed = [(difflib.get_close_matches(str(name), known, 1) or ["console"])[0] for name in names]
        reason = f"verl has no logger {', '.join(map(str, wrong))}."
        override = set_to("trainer.logger", list(dict.fromkeys(fixed)))
        yield Problem("trainer.logger", names, reason, f"Set some of {', '.join(known)}.", "ERROR", (), (override,))


def check_resume(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that a checkpoint to resume from is there, and that one that is named is read."""
    mode, path = OmegaConf.select(config, _MODE), OmegaConf.select(config, _FROM)
    if mode != "resume_path":
        if path is not None and mode in ("auto", "disable"):
            reason = f"nothing reads it with {_MODE}={mode}."
            yield Problem(_FROM, path, reason, "", "NOTE", (), (set_to(_MODE, "resume_path"),))
        return
    step = re.search(r"global_step_(\d+)/?$", path) if isinstance(path, str) else None
    if step is None:
        reason = "with resume_mode=resume_path verl reads a folder called global_step_N from it."
        yield Problem(_FROM, path, reason, f"Set {_FROM}=.../global_step_N, the checkpoint that is meant.", parts=())
    elif _is_local(config, path) and not Path(path).is_dir():
        reason = f"there is no such folder{'' if os.path.isabs(path) else f' in {os.getcwd()}'}."
        yield Problem(_FROM, path, reason, "Set it to the checkpoint that is meant.", parts=())


def check_folders(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that folders that a run writes to can be written."""
    for key in _FOLDERS:
        value = OmegaConf.select(config, key)
        if value is None and key != _FOLDERS[0]:
            continue
        if not isinstance(value, str) or not value.strip():
            yield Problem(key, value, "not a folder.", f"Set {key}=PATH.", parts=())
        elif _is_local(config, value) and (why := _explain_unwritable(value)):
            yield Problem(key, value, f"{why}.", "Set a folder that can be written.", parts=())
    if (application := HydraConfig.instance().cfg) is not None:
        key = "hydra.run.dir"
        try:
            value = OmegaConf.select(cast(DictConfig, application), key)
        except OmegaConfBaseException as error:
            yield Problem(key, "", f"{str(error).splitlines()[0]}.", "Set it to a folder.", parts=())
            return
        if not isinstance(value, str) or not value.strip():
            yield Problem(key, value, "not a folder.", f"Leave it out, or set {key}=PATH.", parts=())
        elif why := _explain_unwritable(value):
            yield Problem(key, value, f"{why}.", "Set a folder that can be written.", parts=())


def check_numbers(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check that no finite number is beyond what float32 or an index can hold."""
    for key, value in _list_numbers(config):
        if isinstance(value, float) and math.isfinite(value) and abs(value) > _LARGEST:
            reason = f"products with it are infinite in float32; beyond {_LARGEST:g} no number is taken."
            yield Problem(key, value, reason, "Set a smaller one.", parts=())
        elif isinstance(value, int) and abs(value) >= 2**63:
            yield Problem(key, f"{str(int(value))[:20]}...", "beyond 64 bits.", "Set a smaller one.", parts=())


def _list_numbers(node: Any, path: str = "") -> Iterator[tuple[str, int | float]]:
    plain = OmegaConf.to_container(node, resolve=False) if isinstance(node, DictConfig) else node
    pairs: Any = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for name, value in pairs:
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, dict | list):
            yield from _list_numbers(value, key)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def _is_local(config: DictConfig, path: str) -> bool:
    """Return True if a path is one of this machine: no URL, and no cluster that may have another file system."""
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return "://" not in path and address in (None, "", "local")


def _explain_unwritable(path: str) -> str:
    """Explain why a folder can be neither made nor written; "" if it can. Nothing is left behind."""
    place = Path(path).absolute()
    try:
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            return f"{place} is a file"
        with tempfile.TemporaryDirectory(dir=place):
            return ""
    except (OSError, ValueError) as error:
        return f"{place} cannot be written: {getattr(error, 'strerror', None) or error}"


def _list_loggers() -> tuple[str, ...]:
    """List the names of loggers in verl's source; empty where it does not list them."""
    source = find_source("verl.utils.tracking")
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if source else ():
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "supported_backend" for target in node.targets
        ):
            return (*ast.literal_eval(node.value), "tracking")
    return ()
