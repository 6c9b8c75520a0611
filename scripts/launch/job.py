"""Shell command and runtime environment of a job on a Ray cluster; pure functions."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_patches.contract import PatchError
from verl_patches.runtime_env import merged, wanted

EXCLUDES = (
    *(".git", ".venv*", "venv", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis"),
    *("outputs", "wandb", "tensorboard_log", "checkpoints"),
)
NO_WORKING_DIR = "none"
NO_WAIT = "--no-wait"
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


class JobError(ValueError):
    """The requested job is not possible; the message names the variable and the fix."""


@dataclass(frozen=True)
class JobRequest:
    """Parsed command line of the launcher.

    Attributes:
        wait: show the log and wait for the end.
        variables: set in the command and its workers.
        command: program and arguments.
    """

    wait: bool
    variables: dict[str, str]
    command: tuple[str, ...]


def parse(words: Sequence[str]) -> JobRequest:
    """Read ``[--no-wait] [NAME=value ...] COMMAND [ARGUMENT ...]``.

    Raises:
        JobError: there is no command, or an option that is not known.
    """
    rest = list(words)
    wait, variables = True, {}
    while rest:
        if rest[0] == NO_WAIT:
            wait = False
        elif _ASSIGNMENT.fullmatch(rest[0]):
            name, _, value = rest[0].partition("=")
            variables[name] = value
        else:
            break
        del rest[0]
    if rest and rest[0] == "--":
        del rest[0]
    elif rest and rest[0].startswith("-"):
        raise JobError(f"{rest[0]}: unknown option. Fix: {NO_WAIT}, or none before the command.")
    if not rest:
        raise JobError("no command. Fix: name one, such as recipe/offpolicy/run_dense_fsdp.sh.")
    return JobRequest(wait, variables, ("bash", *rest) if rest[0].endswith(".sh") else tuple(rest))


def entrypoint(command: Sequence[str]) -> str:
    """Build the line that Ray gives to a shell, in which every word is quoted.

    Without it brackets, quotes and dollars of Hydra's overrides would be the shell's.
    """
    return shlex.join(command)


def runtime_env(
    base: str, working_dir: str, excludes: str, variables: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Build Ray's runtime environment of the job.

    Args:
        base: fields of the user's: a JSON or YAML file, JSON itself, or empty.
        working_dir: a folder, a URI, "none", or empty if ``base`` has one.
        excludes: further patterns, separated by commas.
        variables: given for this job.
        environ: of this process; of it goes along what workers of a corrected run need.

    Raises:
        JobError: a file or folder is not there, or two places contradict each other.
    """
    result = _read(base)
    try:
        result["env_vars"] = merged(result.get("env_vars") or {}, wanted(environ), {})
    except PatchError as error:
        raise JobError(f"RUNTIME_ENV: {error}") from error
    for name, value in variables.items():
        if (there := result["env_vars"].get(name, value)) != value:
            raise JobError(f"{name}={value}: RUNTIME_ENV or the environment says {there}. Fix: give one of them.")
        result["env_vars"][name] = value
    if "working_dir" not in result and working_dir not in ("", NO_WORKING_DIR):
        if "://" not in working_dir and not Path(working_dir).is_dir():
            raise JobError(f"WORKING_DIR={working_dir}: no such folder. Fix: name one, or {NO_WORKING_DIR}.")
        result["working_dir"] = working_dir
    if "working_dir" in result:
        own = [pattern.strip() for pattern in excludes.split(",") if pattern.strip()]
        result["excludes"] = list(dict.fromkeys([*EXCLUDES, *result.get("excludes", []), *own]))
    return result


def _read(base: str) -> dict[str, Any]:
    if not base.strip():
        return {}
    try:
        text = base if base.lstrip().startswith("{") else Path(base).read_text()
        found = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise JobError(f"RUNTIME_ENV={base}: {error}. Fix: name a JSON or YAML file, or give JSON.") from error
    if not isinstance(found, dict):
        raise JobError(f"RUNTIME_ENV={base}: expected fields with values, found {type(found).__name__}.")
    return found
