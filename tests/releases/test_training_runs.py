"""Every release before the newest trains end to end: Ray, vLLM rollouts, weight syncs, live correction.

The quickstart supervises its own run, so a limit that strikes still leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from scripts.quickstart.processes import SHM, read_used_files
from tests.support.whole_runs import ROOT

ROLLOUT = "actor_rollout_ref.rollout"
COLOCATED = "trainer.v1.trainer_mode=colocate_async"

pytestmark = [pytest.mark.verl("<0.9.1"), pytest.mark.slow]


def list_unused() -> set[str]:
    """List the segments in /dev/shm that no process uses; tests in other processes have some in use."""
    used = {identity for pid in psutil.pids() for identity in read_used_files(pid)}
    unused = set()
    for entry in SHM.iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat()
            if (status.st_dev, status.st_ino) not in used:
                unused.add(entry.name)
    return unused


@pytest.fixture
def alone() -> Iterator[None]:
    """Holds a lock that all checkouts on this machine share: Ray and vLLM take all of its cores."""
    with (Path(tempfile.gettempdir()) / "ray_run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="legacy", marks=pytest.mark.verl("==0.7.1")),
        pytest.param(
            [
                "offpolicy.extensions.nudge=tests.support.nudge:Nudge",
                "offpolicy.extensions.sway=tests.support.nudge:Nudge",
                "+nudge.coef=0.001",
                "+sway.coef=0.002",
            ],
            id="extended",
            marks=[pytest.mark.verl("==0.7.1"), pytest.mark.extended],
        ),
        pytest.param(
            ["trainer.use_legacy_worker_impl=disable"],
            id="engine",
            marks=[pytest.mark.verl("==0.7.1"), pytest.mark.extended],
        ),
        pytest.param([], id="v0", marks=pytest.mark.verl("==0.8.0")),
        pytest.param([], id="v1", marks=pytest.mark.verl("==0.9.0")),
        pytest.param([COLOCATED], id="colocate_async", marks=pytest.mark.verl("==0.9.0")),
        pytest.param(["trainer.use_v1=false"], id="v0 next to v1", marks=pytest.mark.verl("==0.9.0")),
    ],
)
def test_three_steps_with_the_correction_live(overrides: list[str]) -> None:
    before = list_unused()
    settings = ["correction=tis_token", "trainer.total_training_steps=3"]
    settings += ["trainer.val_before_train=false", "trainer.test_freq=-1"]
    done = subprocess.run(
        ["bash", "scripts/quickstart.sh", *settings, *overrides],
        cwd=ROOT,
        env={**os.environ, "VENV": sys.prefix},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "proved live" in done.stdout
    steps = re.findall(r"step (\d) of 3: reward [\d.]+, KL ([\d.e-]+)", done.stdout)
    assert [step for step, _ in steps] == ["1", "2", "3"]
    if COLOCATED in overrides:  # every second batch was sampled by the weights before the last update
        assert float(steps.pop(1)[1]) > 2e-3
    # Weights that were lost or garbled on their way to vLLM give 1e-2 and more, its bfloat16 about 1e-4.
    assert all(1e-6 < float(kl) < 2e-3 for _, kl in steps), steps
    assert list_unused() <= before


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=[pytest.mark.verl("==0.7.1"), pytest.mark.extended]),
        pytest.param("bfloat16", marks=[pytest.mark.verl("==0.7.1"), pytest.mark.extended]),
    ],
)
def test_one_engine_leaves_the_second_forward_pass_out(dtype: str) -> None:
    """Hugging Face generation in the trainer's dtype and by its kernels; in bfloat16 it is another engine."""
    settings = ["correction=same_engine", "trainer.total_training_steps=3", f"{ROLLOUT}.dtype={dtype}"]
    settings += [f"{ROLLOUT}.name=hf", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1"]
    settings += ["trainer.val_before_train=false", "trainer.test_freq=-1"]
    done = subprocess.run(
        ["bash", "scripts/quickstart.sh", *settings],
        cwd=ROOT,
        env={**os.environ, "VENV": sys.prefix, "VERL_USE_EXTERNAL_MODULES": "tests.support.hf_rollout"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    folder = re.search(r"everything goes to (\S+)", done.stdout)
    assert folder, done.stdout[-4000:]
    log = (ROOT / folder[1] / "train.log").read_text()
    if dtype == "bfloat16":
        assert done.returncode == 1, done.stdout[-4000:]
        assert re.search(r"correction\.proximal=same_engine: \|mu - pi_old\| is [\d.e-]+ nats at step 1, row \d+", log)
        return
    assert done.returncode == 0, done.stdout[-4000:]
    assert "|mu - pi_old| is at most" in log
    steps = [json.loads(line)["data"] for line in (ROOT / folder[1] / "metrics.jsonl").read_text().splitlines()]
    assert [step["offpolicy/cost/proximal_forwards"] for step in steps] == [1.0, 0.0, 0.0]
    assert all(step["offpolicy/same_engine/largest_difference"] <= 1e-6 for step in steps)
