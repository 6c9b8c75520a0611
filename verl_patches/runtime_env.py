"""Passes the environment variables of this process to Ray's workers.

In a running cluster, workers inherit the environment of the cluster's nodes. This module sends the variables that they
need in `ray_kwargs.ray_init.runtime_env.env_vars`, which verl passes to `ray.init`.
"""

from __future__ import annotations

import json
import os
import site
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import EXTERNAL_MODULES, GROUPS
from .contract import PatchError

if TYPE_CHECKING:
    from omegaconf import DictConfig

KEY = "ray_kwargs.ray_init.runtime_env"
MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
VARIABLES = ("VERL_PLATFORM", "VERL_ENGINE_DEVICE", "VERL_USE_EXTERNAL_PLUGINS", MODEL_RUNNER)
"""Variables of verl and vLLM that must be the same in workers and driver."""
PREFIX = "OFFPOLICY_"
PYTHONPATH = "PYTHONPATH"
VARIABLES_OF_WORKERS = (EXTERNAL_MODULES, PYTHONPATH)
"""Variables whose values the launch extends for the workers."""
_SEPARATORS = {EXTERNAL_MODULES: ",", PYTHONPATH: os.pathsep}
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # variable in which Ray passes a submitted job its runtime environment
_OVERRIDE = "RAY_OVERRIDE_JOB_RUNTIME_ENV"


class ContradictionError(PatchError):
    """A variable has different values in this process and in the configuration or the submitted job.

    Attributes:
        key: key of the configuration that sets the variable; "" if the submitted job sets it.
        value: the other value.
        reason: the value that workers need.
        fix: how to resolve the contradiction.
    """

    def __init__(self, there: str, key: str, value: str, reason: str, fix: str) -> None:
        self.key, self.value, self.reason, self.fix = key, value, reason, fix
        super().__init__(f"{there}: {reason} Fix: {fix}")


def forward(
    config: DictConfig,
    groups: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
) -> None:
    """Add the variables that workers need to the runtime environment of a Hydra configuration, in place.

    Args:
        config: a configuration that contains verl's `ray_kwargs.ray_init`.
        groups: groups of patches that are in force in this process and that workers also need, whether or not the
            environment requests them.
        environ: environment of this process.
        modules: modules that verl must import in every worker, in addition to those of the groups.

    Raises:
        ContradictionError: a value in the configuration or in the submitted job differs from the value in this process.
    """
    # This import is not at the top, because a process that submits a job needs the rest of this module, but may not
    # have Hydra.
    from omegaconf import OmegaConf, open_dict

    environ = os.environ if environ is None else environ
    job = _job_runtime_env(environ)
    # Ray adds a job's working directory to the path of the workers, wherever it is on their node.
    checkout = None if job.get("working_dir") else checkout_root()
    node = OmegaConf.select(config, KEY)
    given = {} if node is None else OmegaConf.to_container(node, resolve=True)
    assert isinstance(given, dict)
    variables = merged(
        given.get("env_vars") or {},
        wanted(environ, groups, checkout, modules),
        job.get("env_vars") or {},
        may_override=environ.get(_OVERRIDE) == "1",
    )
    if variables:
        with open_dict(config):
            OmegaConf.update(config, f"{KEY}.env_vars", variables, merge=False, force_add=True)


def wanted(
    environ: Mapping[str, str],
    groups: Sequence[str] = (),
    checkout: str | None = None,
    modules: Sequence[str] = (),
) -> dict[str, str]:
    """Return the variables that a worker needs to run in the same way as this process.

    Args:
        environ: environment of this process.
        groups: names of groups of patches to load.
        checkout: folder from which to import this package if it is not installed.
        modules: modules for verl to import.
    """
    variables = {key: environ[key] for key in environ if key in VARIABLES or key.startswith(PREFIX)}
    named = [environ.get(EXTERNAL_MODULES, ""), *(GROUPS[name].module for name in groups), *modules]
    if external := joined(EXTERNAL_MODULES, *named):
        variables[EXTERNAL_MODULES] = external
    if checkout:
        variables[PYTHONPATH] = joined(PYTHONPATH, checkout, environ.get(PYTHONPATH, ""))
    return variables


def merged(
    given: Mapping[str, object], wanted: Mapping[str, str], job: Mapping[str, str], *, may_override: bool = False
) -> dict[str, object]:
    """Merge the user's variables with the variables that workers need.

    Lists (of modules or paths) are joined, starting with the user's values. Variables that the submitted job already
    sets are left out, because Ray rejects a variable that is set in both places, even if the values are equal.

    Args:
        given: `env_vars` of the user's configuration.
        wanted: variables that workers need.
        job: `env_vars` with which a job was submitted; empty outside a job.
        may_override: whether Ray is configured to let the driver's variables override the job's.

    Raises:
        ContradictionError: a variable has another value in `given` or `job`.
    """
    result = dict(given)
    for key, value in wanted.items():
        if key in given:
            there = str(given[key])
            if key not in _SEPARATORS and there != value:
                path = f"{KEY}.env_vars.{key}"
                fix = f"Remove this override, or start this process with {key}={there}."
                raise ContradictionError(f"{path}={there}", path, there, _needed(key, value), fix)
            result[key] = joined(key, there, value)
        elif key not in job or may_override:
            result[key] = joined(key, job.get(key, ""), value) if key in _SEPARATORS else value
        elif key != PYTHONPATH and joined(key, job[key], value) != joined(key, job[key]):
            # Only the job knows where its files are. If a package is missing there, the import of verl fails.
            fix = f"Submit the job with {key}={joined(key, job[key], value)}, or set {_OVERRIDE}=1."
            there = f"{key}={job[key]} of the submitted job"
            raise ContradictionError(there, "", job[key], _needed(key, value), fix)
    return result


def _job_runtime_env(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the runtime environment with which this process's job was submitted; empty outside a job."""
    found: dict[str, Any] = json.loads(environ.get(_JOB) or "{}").get("runtime_env") or {}
    return found


def checkout_root() -> str | None:
    """Return the folder that contains this package; None if it is one of the interpreter's own package folders."""
    root = Path(__file__).resolve().parents[1]
    paths = sysconfig.get_paths()
    installed = {paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()}
    return None if root in {Path(path).resolve() for path in installed} else str(root)


def _needed(key: str, value: str) -> str:
    return f"workers need {key}={value}, as in this process."


def joined(key: str, *values: str) -> str:
    """Join values of an environment variable. A list contains each part once, in order; otherwise, the last value
    wins."""
    separator = _SEPARATORS.get(key)
    if separator is None:
        return values[-1]
    parts = [part.strip() for value in values for part in value.split(separator)]
    return separator.join(dict.fromkeys(part for part in parts if part))
