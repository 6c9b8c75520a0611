"""Submit a job to a Ray cluster and exit with its status; scripts/launch_ray.sh documents arguments and variables.

Ray's own command joins words in a way that a POSIX shell reads otherwise, and ends with 0 where a job was stopped.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from job import JobError, JobRequest, entrypoint, parse, runtime_env

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
USAGE = 2
NOT_SUCCEEDED = 1
_POLL_SECONDS = 1.0


def connect(address: str) -> Any:
    """Connect to the cluster's job server.

    Raises:
        JobError: nothing answers there, or Ray is not installed here.
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
        0 if it succeeded, else the exit status of its command, or 1 where that is unknown or 0.
    """

    import aiohttp  # which Ray's client is made with

    async def tail() -> None:
        async for lines in client.tail_job_logs(job):
            print(lines, end="", flush=True)

    try:
        asyncio.run(tail())
    except (OSError, RuntimeError, aiohttp.ClientError) as error:
        print(f"launch: the log of job {job} is lost ({error}); it runs on.", file=sys.stderr)
    # The log may end before the job does.
    while not client.get_job_status(job).is_terminal():
        time.sleep(_POLL_SECONDS)
    info = client.get_job_info(job)
    reason = (info.message or "").partition(", last available logs")[0]  # they have been shown
    print(f"launch: job {job} {info.status.value.lower()}. {reason}".rstrip(), file=sys.stderr)
    if info.status.value == "SUCCEEDED":
        return 0
    return info.driver_exit_code or NOT_SUCCEEDED


def launch(request: JobRequest) -> int:
    """Submit, and follow if that was asked for; returns the launcher's exit status."""
    environment = runtime_env(
        os.environ.get("RUNTIME_ENV", ""),
        os.environ.get("WORKING_DIR", ""),
        os.environ.get("EXCLUDES", ""),
        request.variables,
        os.environ,
    )
    address = os.environ.get("RAY_ADDRESS") or DEFAULT_ADDRESS
    client = connect(address)
    job = client.submit_job(
        entrypoint=entrypoint(request.command),
        runtime_env=environment,
        submission_id=os.environ.get("SUBMISSION_ID") or None,
    )
    print(f"launch: job {job} at {address}: {entrypoint(request.command)}", file=sys.stderr, flush=True)
    if request.wait:
        return follow(client, job)
    print(f"launch: not waited for; ray job logs --address {address} --follow {job}", file=sys.stderr)
    return 0


def main() -> int:
    try:
        return launch(parse(sys.argv[1:]))
    except JobError as error:
        print(f"launch: {error}", file=sys.stderr)
        return USAGE


if __name__ == "__main__":
    sys.exit(main())
