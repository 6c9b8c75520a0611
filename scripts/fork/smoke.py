"""Smoke test of a copy in place: from the checkout's root, with its verl, in the user's environment."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass

from .checkout import Fork

LIMIT = 900  # seconds a step; a machine that does nothing else takes at most 60
LAUNCH = (
    "correction=[tis_token,gsm]",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
)
"""A correction, and what verl demands of every launch."""
ORIGINS = """
import sys, verl, recipe.offpolicy, verl_patches
from pathlib import Path
from verl_patches.releases import release_of
release, root, place = sys.argv[1:]
wanted = {verl: "verl", recipe.offpolicy: f"{place}recipe/offpolicy", verl_patches: f"{place}verl_patches"}
for module, folder in wanted.items():
    name, found = module.__name__, Path(module.__file__).resolve()
    if found != Path(root, folder, "__init__.py"):
        fix = f"VENV=path of an environment that has no {name} of its own before PYTHONPATH."
        sys.exit(f"{name} was imported from {found}, not from {Path(root, folder)}. Fix: {fix}")
if release_of(verl.__version__) != release:
    fix = "make verl/__init__.py read verl/version/version, as verl does."
    sys.exit(f"verl says it is {verl.__version__}, its version file {release}. Fix: {fix}")
"""
STEPS = (
    ("imports", ("-c", ORIGINS), "VENV=path of an environment that runs this checkout"),
    (
        "--cfg job",
        ("-m", "recipe.offpolicy.main_offpolicy", "--cfg", "job"),
        "compare verl/trainer/config with that of the release, which our primary configuration inherits",
    ),
    ("contracts", ("-m", "verl_patches"), "run `python -m verl_patches` there, which shows every seam"),
    ("doctor", ("-m", "recipe.offpolicy.doctor", *LAUNCH), "run the doctor there by itself"),
    (
        "one CPU update",
        ("-m", "recipe.offpolicy.smoke"),
        "compare verl/workers/utils/losses.py with that of the release: the correction goes through its ppo_loss",
    ),
)
"""Name, arguments of Python, and the fix where the program itself names none."""


@dataclass(frozen=True)
class Failure:
    """Reason and fix of a step that failed."""

    reason: str
    fix: str


def smoke_test(fork: Fork, python: str) -> Failure | None:
    """Run the steps one after the other, each named before it starts, up to the first that fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [fork.python_path, os.environ.get("PYTHONPATH")])),
        "PYTHONDONTWRITEBYTECODE": "1",  # no bytecode in the checkout
        "HYDRA_FULL_ERROR": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    for name, arguments, fix in STEPS:
        print(f"    {name:<15} ", end="", flush=True)
        started, said = time.monotonic(), ""
        more = (fork.release, str(fork.root), fork.place) if name == "imports" else ()
        try:
            done = subprocess.run(
                [python, *arguments, *more], cwd=fork.root, env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=LIMIT, check=False,
            )  # fmt: skip
            failure = explain(done, fix)
            said = (done.stdout.strip().splitlines() or [""])[-1]
        except subprocess.TimeoutExpired:
            failure = Failure(f"it took more than {LIMIT} s", "copy again when the machine is less busy")
        shown = said if said.startswith("offpolicy:") else ""
        print(f"{'FAILED' if failure else 'ok':<6} {time.monotonic() - started:5.1f} s  {shown}", flush=True)
        if failure:
            return Failure(f"{name}: {failure.reason}", failure.fix)
    return None


def explain(done: subprocess.CompletedProcess[str], fix: str) -> Failure | None:
    """Build the failure of a program that ended with another status than 0; `fix` is for those that name none."""
    if done.returncode == 0:
        return None
    # The last line, for warnings name packages that no one needs.
    if missing := re.search(r"^ModuleNotFoundError: No module named '([\w.]+)'\s*\Z", done.stderr, re.M):
        package = missing[1].partition(".")[0]
        if package not in ("verl", "recipe", "verl_patches"):
            return Failure(f"{package} is not installed", f"VENV=path of an environment that has {package}")
        return Failure(f"there is no {missing[1]}", "restore it in the checkout, which has it in this release")
    lines = (done.stderr + done.stdout).strip().splitlines()
    if own := [line for line in lines if "Fix: " in line]:
        return Failure("\n".join(dict.fromkeys(own)), "as each line says, in the checkout")
    # Of a traceback the last line says it.
    traceback = "Traceback (most recent call last):" in done.stderr
    said = done.stderr.strip().splitlines()[-1:] if traceback else lines[-20:]
    return Failure("\n".join(said) or f"exit {done.returncode}", fix)
