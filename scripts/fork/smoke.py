"""Tries a copy where it lies: from the checkout's root, with the checkout's verl, in an environment of the user's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkout import Fork, release_of

LIMIT = 900  # seconds a step; a machine that does nothing else takes at most 60
LAUNCH = (
    "correction=[tis_token,gsm]",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
)
"""A correction, and what verl demands of every launch."""
_WHERE = (
    "import json, verl, verl_patches, recipe.offpolicy as recipe; "
    "print(json.dumps([verl.__file__, recipe.__file__, verl_patches.__file__, verl.__version__]))"
)


@dataclass(frozen=True)
class Failure:
    """Why a step failed, and what mends that."""

    reason: str
    fix: str


@dataclass(frozen=True)
class Ended:
    """How a step's program ended."""

    status: int
    out: str
    err: str


def smoke_test(fork: Fork, python: str) -> Failure | None:
    """Run the steps one after the other, each named before and judged after it, up to the first that fails."""
    steps: tuple[tuple[str, tuple[str, ...], Callable[[Ended, Fork], Failure | None]], ...] = (
        ("imports", ("-c", _WHERE), judge_origins),
        ("--cfg job", ("-m", "recipe.offpolicy.main_offpolicy", "--cfg", "job"), judge_configuration),
        ("contracts", ("-m", "verl_patches"), judge_contracts),
        ("doctor", ("-m", "recipe.offpolicy.doctor", "--json", *LAUNCH), judge_doctor),
        ("one CPU update", ("-m", "recipe.offpolicy.smoke"), judge_update),
    )
    for name, arguments, judge in steps:
        print(f"    {name:<15} ", end="", flush=True)
        started = time.monotonic()
        said = ""
        try:
            ended = _run([python, *arguments], fork)
            failure = judge(ended, fork)
            said = (ended.out.strip().splitlines() or [""])[-1]
        except subprocess.TimeoutExpired:
            failure = Failure(f"it took more than {LIMIT} s", "copy again when the machine is less busy")
        shown = said if said.startswith("offpolicy:") else ""
        print(f"{'FAILED' if failure else 'ok':<6} {time.monotonic() - started:5.1f} s  {shown}", flush=True)
        if failure:
            return Failure(f"{name}: {failure.reason}", failure.fix)
    return None


def _run(command: list[str], fork: Fork) -> Ended:
    """Run in the environment of the documented command, which moreover leaves no bytecode in the checkout."""
    given = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{fork.python_path}{os.pathsep}{given}" if given else fork.python_path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYDRA_FULL_ERROR": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    done = subprocess.run(
        command, cwd=fork.root, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


def failed(ended: Ended, fix: str) -> Failure | None:
    """The failure of a program that ended with another status than 0; `fix` is for all but a missing package."""
    if ended.status == 0:
        return None
    # The last line, for warnings name packages that nobody needs.
    if missing := re.search(r"^ModuleNotFoundError: No module named '([\w.]+)'\s*\Z", ended.err, re.M):
        package = missing[1].partition(".")[0]
        if package not in ("verl", "recipe", "verl_patches"):
            return Failure(f"{package} is not installed", f"VENV=path of an environment that has {package}")
        return Failure(f"there is no {missing[1]}", "restore it in the checkout, which has it in this release")
    lines = (ended.out + ended.err).strip().splitlines()
    # Of a traceback the last line says it.
    said = lines[-1:] if "Traceback (most recent call last):" in ended.err else lines[-12:]
    return Failure("\n".join(said) or f"exit {ended.status}", fix)


def judge_origins(ended: Ended, fork: Fork) -> Failure | None:
    """Check that what is imported is the fork's verl and the copy."""
    if failure := failed(ended, "VENV=path of an environment that runs this checkout"):
        return failure
    *found, release = json.loads(ended.out.strip().splitlines()[-1])
    here = fork.root / fork.place
    folders = (fork.root / "verl", here / "recipe" / "offpolicy", here / "verl_patches")
    for name, file, folder in zip(("verl", "recipe.offpolicy", "verl_patches"), found, folders, strict=True):
        if Path(file).resolve() != folder / "__init__.py":
            fix = f"VENV=path of an environment that has no {name} of its own before PYTHONPATH"
            return Failure(f"{name} was imported from {file}, not from {folder / '__init__.py'}", fix)
    if (release := release_of(release)) != fork.release:
        fix = "make verl/__init__.py read verl/version/version, as verl does"
        return Failure(f"verl says it is {release}, its version file {fork.release}", fix)
    return None


def judge_configuration(ended: Ended, fork: Fork) -> Failure | None:
    """Check that our sections compose with the fork's."""
    fix = "compare verl/trainer/config with that of the release, which our primary configuration inherits"
    if failure := failed(ended, fix):
        return failure
    keys = {line.partition(":")[0] for line in ended.out.splitlines() if line[:1].isalpha()}
    missing = {"actor_rollout_ref", "algorithm", "trainer", "correction", "offpolicy"} - keys
    return Failure(f"the composed configuration lacks {', '.join(sorted(missing))}", fix) if missing else None


def judge_contracts(ended: Ended, fork: Fork) -> Failure | None:
    """Check that every seam holds; each that does not says its own fix."""
    moved = [line for line in ended.err.splitlines() if "Fix: " in line]
    if ended.status and moved:
        return Failure("\n".join(moved), "as each line says; the fork has changed what the correction goes through")
    return failed(ended, "run `python -m verl_patches` there, which shows every seam")


def judge_doctor(ended: Ended, fork: Fork) -> Failure | None:
    """Check that a correction passes every check of a launch, on the fork's own configuration and release."""
    try:
        said: dict[str, Any] = json.loads(ended.out)
    except ValueError:
        return failed(ended, "run the doctor there by itself") or Failure("it printed no JSON", "copy again")
    if said["error"]:
        return Failure(said["error"], "as it says")
    release = said["path"]["release"] if said["path"] else None
    if release != fork.release:
        return Failure(f"it looked at verl {release}, not {fork.release}", "VENV=path of another environment")
    if said["verdict"] == "LIVE":
        return None
    lines = []
    for problem in (problem for row in said["corrections"] for problem in row["problems"]):
        key, value = problem["key"], problem["value"]
        given = f"{key}={value if isinstance(value, str) else json.dumps(value)}: " if key else ""
        lines.append(f"{given}{problem['reason']} {problem['fix']}".rstrip())
    return Failure("\n".join(dict.fromkeys(lines)), "as each line says, in the fork's own configuration")


def judge_update(ended: Ended, fork: Fork) -> Failure | None:
    """Check that one update through the fork's loss was live."""
    fix = "compare verl/workers/utils/losses.py with that of the release: the correction goes through its ppo_loss"
    if failure := failed(ended, fix):
        return failure
    wanted = f"LIVE through verl {fork.release} in {fork.root / 'verl'}:"
    return None if wanted in ended.out else Failure(f"it did not say that the correction is {wanted}", fix)
