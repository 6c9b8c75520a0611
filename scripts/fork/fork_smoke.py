"""Tries a copy where it lies: from the checkout's root, with the checkout's verl, in an environment of the user's."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fork_checkout import Checkout, Place

LIMIT = 900  # seconds a step; a machine that does nothing else takes at most 60
_WHERE = (
    "import json, verl, verl_patches, recipe.offpolicy as recipe; "
    "print(json.dumps([verl.__file__, recipe.__file__, verl_patches.__file__, verl.__version__]))"
)

_LAUNCH = (
    "correction=[tis_token,gsm]",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
)
"""A correction, and what verl demands of every launch."""


@dataclass(frozen=True)
class Outcome:
    """One step of the smoke test.

    Attributes:
        name: what was tried.
        error: why it failed; "" where it did not.
        said: the step's last words.
    """

    name: str
    seconds: float
    error: str
    said: str


@dataclass(frozen=True)
class _Step:
    name: str
    arguments: tuple[str, ...]
    judge: Callable[[str], str]  # takes the output; "" if it is as it should be


def smoke_test(checkout: Checkout, place: Place, python: str) -> Iterator[Outcome]:
    """Runs the steps one after the other, up to the first that fails."""
    for step in _steps(checkout, place):
        outcome = _run(step, checkout, place, python)
        yield outcome
        if outcome.error:
            return


def _steps(checkout: Checkout, place: Place) -> tuple[_Step, ...]:
    return (
        _Step("imports", ("-c", _WHERE), lambda said: _judge_origins(said, checkout, place)),
        _Step("--cfg job", ("-m", "recipe.offpolicy.main_offpolicy", "--cfg", "job"), _judge_configuration),
        _Step("contracts", ("-m", "verl_patches"), lambda said: ""),
        _Step("doctor", ("-m", "recipe.offpolicy.doctor", *_LAUNCH), lambda said: _judge_doctor(said, checkout)),
        _Step("one CPU update", ("-m", "recipe.offpolicy.smoke"), lambda said: _judge_update(said, checkout)),
    )


def _run(step: _Step, checkout: Checkout, place: Place, python: str) -> Outcome:
    started = time.monotonic()
    environment = environment_of(checkout, place)
    try:
        done = subprocess.run(
            [python, *step.arguments],
            cwd=checkout.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(step.name, time.monotonic() - started, f"it took more than {LIMIT} s", "")
    seconds = time.monotonic() - started
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        return Outcome(step.name, seconds, f"exit {done.returncode}:\n{tail}", "")
    return Outcome(step.name, seconds, step.judge(done.stdout), (done.stdout.strip().splitlines() or [""])[-1])


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


def _judge_origins(said: str, checkout: Checkout, place: Place) -> str:
    verl, recipe, patches, release = json.loads(said.strip().splitlines()[-1])
    here = checkout.root / place.folder
    wanted = {
        "verl": (verl, checkout.root / "verl" / "__init__.py"),
        "recipe.offpolicy": (recipe, here / "recipe" / "offpolicy" / "__init__.py"),
        "verl_patches": (patches, here / "verl_patches" / "__init__.py"),
    }
    for name, (found, expected) in wanted.items():
        if Path(found).resolve() != expected:
            return f"{name} was imported from {found}, not from {expected}"
    return "" if release == checkout.release else f"verl says it is {release}, its version file {checkout.release}"


def _judge_configuration(said: str) -> str:
    keys = {line.partition(":")[0] for line in said.splitlines() if line[:1].isalpha()}
    missing = {"actor_rollout_ref", "algorithm", "trainer", "correction", "offpolicy"} - keys
    return f"the composed configuration lacks {', '.join(sorted(missing))}" if missing else ""


def _judge_doctor(said: str, checkout: Checkout) -> str:
    """Every check that a launch makes at its start, on the fork's own configuration and release."""
    path, *_, conclusion = said.strip().splitlines()
    if not path.startswith(f"verl {checkout.release}, "):
        return f"it looked at {path}"
    return "" if conclusion.startswith("LIVE: ") else conclusion


def _judge_update(said: str, checkout: Checkout) -> str:
    wanted = f"LIVE through verl {checkout.release} in {checkout.root / 'verl'}:"
    return "" if wanted in said else f"it did not say that the correction is {wanted}"
