"""Submits a job to a Ray cluster and exits with the job's status; scripts/launch_ray.sh documents the arguments.

Ray's own command joins words in such a way that a POSIX shell would parse them differently, and exits with 0 if a job
was stopped.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_patches.contract import PatchError
from verl_patches.runtime_env import merged, wanted

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
USAGE = 2
NOT_SUCCEEDED = 1
_POLL_SECONDS = 1.0
EXCLUDES = (
    *(".git", ".venv*", "venv", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis"),
    *("outputs", "wandb", "tensorboard_log", "checkpoints"),
)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


class JobError(ValueError):
    """The job cannot be run as requested; the message names the variable and the fix."""


@dataclass(frozen=True)
class JobRequest:
    """The parsed command line of the launcher.

    Attributes:
        wait: whether to show the log and wait for the end.
        variables: environment variables for the command and its workers.
        command: program and arguments.
    """

    wait: bool
    variables: dict[str, str]
    command: tuple[str, ...]


def parse(words: Sequence[str]) -> JobRequest:
    """Read ``[--no-wait] [NAME=value ...] COMMAND [ARGUMENT ...]``.

    Raises:
        JobError: there is no command, or an option is unknown.
    """
    rest = list(words)
    wait, variables = True, {}
    while rest and (rest[0] == "--no-wait" or _ASSIGNMENT.fullmatch(rest[0])):
        name, assigned, value = rest.pop(0).partition("=")
        if assigned:
            variables[name] = value
        else:
            wait = False
    if rest and rest[0] == "--":
        del rest[0]
    elif rest and rest[0].startswith("-"):
        raise JobError(f"{rest[0]}: unknown option. Fix: use --no-wait, or no option before the command.")
    if not rest:
        raise JobError("no command. Fix: name one, such as recipe/offpolicy/run_dense_fsdp.sh.")
    return JobRequest(wait, variables, ("bash", *rest) if rest[0].endswith(".sh") else tuple(rest))


def runtime_env(
    base: str, working_dir: str, excludes: str, variables: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Build Ray's runtime environment for the job.

    Args:
        base: the user's fields, as a JSON or YAML file, or as JSON itself; may be empty.
        working_dir: a folder, a URI, or "none"; empty if ``base`` contains one.
        excludes: further patterns, separated by commas.
        variables: variables given for this job.
        environ: environment of this process, from which the variables that workers of a corrected run need are taken.

    Raises:
        JobError: a file or folder is missing, or two settings contradict each other.
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
    if "working_dir" not in result and working_dir not in ("", "none"):
        if "://" not in working_dir and not Path(working_dir).is_dir():
            raise JobError(f"WORKING_DIR={working_dir}: no such folder. Fix: name one, or none.")
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
        raise JobError(f"RUNTIME_ENV={base}: {error}. Fix: name a JSON or YAML file, or pass JSON.") from error
    if not isinstance(found, dict):
        raise JobError(f"RUNTIME_ENV={base}: expected fields with values, found {type(found).__name__}.")
    return found


def connect(address: str) -> Any:
    """Connect to the cluster's job server.

    Raises:
        JobError: nothing answers at the address, or Ray is not installed here.
    """
    try:
        from ray.exceptions import RayError
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise JobError(f"{sys.executable}: {error}. Fix: PYTHON=path of a Python with ray[default].") from error
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise JobError(
            f"RAY_ADDRESS={address}: {error} Fix: name the dashboard of a running cluster, http://HEAD:8265, where "
            f"ray[default] is installed."
        ) from error


def follow(client: Any, job: str) -> int:
    """Show the log until the job ends.

    Returns:
        0 if the job succeeded, otherwise the exit status of its command, or 1 if that status is unknown or 0.
    """

    import aiohttp  # the HTTP library of Ray's client

    async def tail() -> None:
        async for lines in client.tail_job_logs(job):
            print(lines, end="", flush=True)

    try:
        asyncio.run(tail())
    except (OSError, RuntimeError, aiohttp.ClientError) as error:
        print(f"launch: the log of job {job} is lost ({error}); the job continues.", file=sys.stderr)
    # The log may end before the job ends.
    while not client.get_job_status(job).is_terminal():
        time.sleep(_POLL_SECONDS)
    info = client.get_job_info(job)
    reason = (info.message or "").partition(", last available logs")[0]  # these lines have been shown
    print(f"launch: job {job} {info.status.value.lower()}. {reason}".rstrip(), file=sys.stderr)
    if info.status.value == "SUCCEEDED":
        return 0
    return info.driver_exit_code or NOT_SUCCEEDED


def launch(request: JobRequest) -> int:
    """Submit the job, and follow it if this is requested; return the launcher's exit status."""
    base, working_dir, excludes = (os.environ.get(name, "") for name in ("RUNTIME_ENV", "WORKING_DIR", "EXCLUDES"))
    environment = runtime_env(base, working_dir, excludes, request.variables, os.environ)
    address = os.environ.get("RAY_ADDRESS") or DEFAULT_ADDRESS
    client = connect(address)
    # Every word is quoted, because the shell would otherwise interpret brackets, quotes and dollar signs in Hydra's
    # overrides.
    entrypoint = shlex.join(request.command)
    name = os.environ.get("SUBMISSION_ID") or None
    job = client.submit_job(entrypoint=entrypoint, runtime_env=environment, submission_id=name)
    print(f"launch: job {job} at {address}: {entrypoint}", file=sys.stderr, flush=True)
    if request.wait:
        return follow(client, job)
    print(
        f"launch: the job continues without this program; to follow it: ray job logs --address {address} --follow "
        f"{job}",
        file=sys.stderr,
    )
    return 0


def main() -> int:
    try:
        return launch(parse(sys.argv[1:]))
    except JobError as error:
        print(f"launch: {error}", file=sys.stderr)
        return USAGE


if __name__ == "__main__":
    sys.exit(main())
