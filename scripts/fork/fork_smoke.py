"""Tries a copy where it lies: from the checkout's root, with the checkout's verl, in an environment of the user's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fork_checkout import Checkout, Place, release_of

LIMIT = 900  # seconds a step; a machine that does nothing else takes at most 60
_WHERE = (
    "import json, verl, verl_patches, recipe.offpolicy as recipe; "
    "print(json.dumps([verl.__file__, recipe.__file__, verl_patches.__file__, verl.__version__]))"
)

_COPIED_OR_FORK = frozenset({"verl", "recipe", "verl_patches"})

LAUNCH = (
    "correction=[tis_token,gsm]",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
)
"""A correction, and what verl demands of every launch."""


@dataclass(frozen=True)
class Failure:
    """Why a step failed, and what mends that."""

    reason: str
    fix: str


@dataclass(frozen=True)
class Outcome:
    """One step of the smoke test.

    Attributes:
        name: what was tried.
        failure: None where it did not fail.
        said: the step's last words.
    """

    name: str
    seconds: float
    failure: Failure | None
    said: str


@dataclass(frozen=True)
class Ended:
    """How a step's program ended."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class _Step:
    name: str
    arguments: tuple[str, ...]
    judge: Callable[[Ended], Failure | None]


def smoke_test(
    checkout: Checkout, place: Place, python: str, begin: Callable[[str], None] = lambda name: None
) -> Iterator[Outcome]:
    """Runs the steps one after the other, up to the first that fails; `begin` takes the name of each before."""
    for step in _steps(checkout, place):
        begin(step.name)
        outcome = _run(step, checkout, place, python)
        yield outcome
        if outcome.failure:
            return


def _steps(checkout: Checkout, place: Place) -> tuple[_Step, ...]:
    doctor = ("-m", "recipe.offpolicy.doctor", "--json", *LAUNCH)
    return (
        _Step("imports", ("-c", _WHERE), lambda ended: judge_origins(ended, checkout, place)),
        _Step("--cfg job", ("-m", "recipe.offpolicy.main_offpolicy", "--cfg", "job"), judge_configuration),
        _Step("contracts", ("-m", "verl_patches"), judge_contracts),
        _Step("doctor", doctor, lambda ended: judge_doctor(ended, checkout)),
        _Step("one CPU update", ("-m", "recipe.offpolicy.smoke"), lambda ended: judge_update(ended, checkout)),
    )


def _run(step: _Step, checkout: Checkout, place: Place, python: str) -> Outcome:
    started = time.monotonic()
    try:
        done = subprocess.run(
            [python, *step.arguments],
            cwd=checkout.root,
            env=environment_of(checkout, place),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        late = Failure(f"it took more than {LIMIT} s", "copy again when the machine is less busy")
        return Outcome(step.name, time.monotonic() - started, late, "")
    seconds = time.monotonic() - started
    failure = step.judge(Ended(done.returncode, done.stdout, done.stderr))
    return Outcome(step.name, seconds, failure, (done.stdout.strip().splitlines() or [""])[-1])


def environment_of(checkout: Checkout, place: Place) -> dict[str, str]:
    """The environment of the documented command, which moreover leaves no bytecode in the checkout."""
    given = os.environ.get("PYTHONPATH")
    path = place.python_path(checkout.root)
    return {
        **os.environ,
        "PYTHONPATH": f"{path}{os.pathsep}{given}" if given else path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYDRA_FULL_ERROR": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def failed(ended: Ended, fix: str) -> Failure | None:
    """The failure of a program that ended with another status than 0.

    Args:
        fix: where it is not that a package is missing.
    """
    if ended.status == 0:
        return None
    # The last line, for warnings name packages that nobody needs.
    if missing := re.search(r"^ModuleNotFoundError: No module named '([\w.]+)'\s*\Z", ended.err, re.M):
        package = missing[1].partition(".")[0]
        if package not in _COPIED_OR_FORK:
            return Failure(f"{package} is not installed", f"VENV=path of an environment that has {package}")
        return Failure(f"there is no {missing[1]}", "restore it in the checkout, which has it in this release")
    lines = (ended.out + ended.err).strip().splitlines()
    # Of a traceback the last line says it.
    said = lines[-1:] if "Traceback (most recent call last):" in ended.err else lines[-12:]
    return Failure("\n".join(said) or f"exit {ended.status}", fix)


def judge_origins(ended: Ended, checkout: Checkout, place: Place) -> Failure | None:
    """Whether what is imported is the fork's verl and the copy."""
    if failure := failed(ended, "VENV=path of an environment that runs this checkout"):
        return failure
    verl, recipe, patches, release = json.loads(ended.out.strip().splitlines()[-1])
    here = checkout.root / place.folder
    wanted = {
        "verl": (verl, checkout.root / "verl" / "__init__.py"),
        "recipe.offpolicy": (recipe, here / "recipe" / "offpolicy" / "__init__.py"),
        "verl_patches": (patches, here / "verl_patches" / "__init__.py"),
    }
    for name, (found, expected) in wanted.items():
        if Path(found).resolve() != expected:
            fix = f"VENV=path of an environment that has no {name} of its own before PYTHONPATH"
            return Failure(f"{name} was imported from {found}, not from {expected}", fix)
    if (release := release_of(release)) != checkout.release:
        fix = "make verl/__init__.py read verl/version/version, as verl does"
        return Failure(f"verl says it is {release}, its version file {checkout.release}", fix)
    return None


def judge_configuration(ended: Ended) -> Failure | None:
    """Whether our sections compose with the fork's."""
    fix = "compare verl/trainer/config with that of the release, which our primary configuration inherits"
    if failure := failed(ended, fix):
        return failure
    keys = {line.partition(":")[0] for line in ended.out.splitlines() if line[:1].isalpha()}
    missing = {"actor_rollout_ref", "algorithm", "trainer", "correction", "offpolicy"} - keys
    return Failure(f"the composed configuration lacks {', '.join(sorted(missing))}", fix) if missing else None


def judge_contracts(ended: Ended) -> Failure | None:
    """Whether every seam holds; each that does not says its own fix."""
    moved = [line for line in ended.err.splitlines() if "Fix: " in line]
    if ended.status and moved:
        return Failure("\n".join(moved), "as each line says; the fork has changed what the correction goes through")
    return failed(ended, "run `python -m verl_patches` there, which shows every seam")


def judge_doctor(ended: Ended, checkout: Checkout) -> Failure | None:
    """Whether a correction passes every check of a launch, on the fork's own configuration and release."""
    try:
        said: dict[str, Any] = json.loads(ended.out)
    except ValueError:
        return failed(ended, "run the doctor there by itself") or Failure("it printed no JSON", "copy again")
    if said["error"]:
        return Failure(said["error"], "as it says")
    release = said["path"]["release"] if said["path"] else None
    if release != checkout.release:
        return Failure(f"it looked at verl {release}, not {checkout.release}", "VENV=path of another environment")
    if said["verdict"] == "LIVE":
        return None
    problems = [problem for row in said["corrections"] for problem in row["problems"]]
    lines = [f"{_given(each)}{each['reason']} {each['fix']}".rstrip() for each in problems]
    return Failure("\n".join(dict.fromkeys(lines)), "as each line says, in the fork's own configuration")


def _given(problem: dict[str, Any]) -> str:
    key, value = problem["key"], problem["value"]
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}: " if key else ""


def judge_update(ended: Ended, checkout: Checkout) -> Failure | None:
    """Whether one update through the fork's loss was live."""
    fix = "compare verl/workers/utils/losses.py with that of the release: the correction goes through its ppo_loss"
    if failure := failed(ended, fix):
        return failure
    wanted = f"LIVE through verl {checkout.release} in {checkout.root / 'verl'}:"
    return None if wanted in ended.out else Failure(f"it did not say that the correction is {wanted}", fix)
