"""Each of verl's programs, and a user's own program, on a CPU: one override corrects it, and a fault stops it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from scripts.quickstart.options import build_child_environment, build_release_overrides
from tests.support.paths import ROOT
from tests.support.whole_runs import build_launch
from verl_patches.contract import demand_release

pytestmark = [pytest.mark.slow, pytest.mark.extended]

STEPS, LIMIT = 3, 900.0
"""Seconds after which a run counts as hanging; on an idle machine, a run takes 100 to 200 seconds."""
OURS = "+correction@correction=[tis_token,gsm]"
LIVE = re.compile(r"weight, masks\.gsm LIVE in the gradient of \d+ tokens \(error [\d.e-]+\), mu of (\d+) rows")
STEP = re.compile(r"step:\d+ - (.*)")
METRIC = re.compile(r"([\w/]+):(?:np\.float\d+\()?(-?\d[\d.]*(?:e[-+]?\d+)?)")
PRIMARY = """
hydra:
  searchpath: [pkg://verl.trainer.config]
defaults: [ppo_trainer, _self_]
offpolicy:
  record: {{dir: {recording}, every: 2}}
"""


@dataclass(frozen=True)
class Program:
    """A program that is launched by ``python -m``.

    Attributes:
        ages: least and greatest ``offpolicy/staleness/max`` of each step.
        rows: of an update.
    """

    module: str
    overrides: tuple[str, ...] = ()
    ages: tuple[tuple[float, float], ...] = ((0.0, 0.0),) * STEPS
    rows: int = 64
    own_primary: bool = False
    releases: str = ">=0.9.1"


V1 = "verl.trainer.main_ppo"
SIXTEEN = "data.train_batch_size=16"
PROGRAMS = {
    "v1": Program(V1, (SIXTEEN,)),
    "v0": Program(V1, (SIXTEEN, "trainer.use_v1=false")),
    "fully_async": Program(
        "verl.experimental.fully_async_policy.fully_async_main",
        ("+mode=fully_async_cpu", "rollout.total_rollout_steps=64", "rollout.n=4"),
        # Before the first synchronisation, and after it.
        ages=((0.0, 0.0), (1.0, 2.0)),
        rows=32,
        releases=">=0.8",
    ),
    "one_step_off": Program(
        "verl.experimental.one_step_off_policy.main_ppo",
        ("+mode=one_step_off_cpu", SIXTEEN, "hydra.searchpath=[pkg://verl.trainer.config]"),
        ages=((0.0, 0.0), (1.0, 1.0), (1.0, 1.0)),
        releases=">=0.8",
    ),
    "own_fit": Program("tests.support.own_fit", (SIXTEEN, "trainer.use_v1=false"), rows=32, own_primary=True),
    "own_primary": Program(V1, (SIXTEEN,), own_primary=True),
}


EACH = [pytest.param(name, marks=pytest.mark.verl(program.releases)) for name, program in PROGRAMS.items()]


def launch(
    run_program: Callable[..., Any], made: dict[str, Path], program: Program, tmp_path: Path, **environment: str
) -> Any:
    """Run a program to its end with a correction."""
    primary = []
    if program.own_primary:
        (tmp_path / "mine.yaml").write_text(PRIMARY.format(recording=tmp_path / "recording"))
        primary = [f"--config-dir={tmp_path}", "--config-name=mine"]
    given = {**os.environ, **environment}
    platform, *_ = build_release_overrides("cpu", demand_release())
    finished = run_program(
        [
            *(sys.executable, "-m", program.module, *primary, f"+{platform}"),
            *build_launch(made, tmp_path, **{"trainer.total_training_steps": STEPS}),
            *(OURS, *program.overrides),
        ],
        limit=LIMIT,
        may_leave=True,  # what verl itself does not remove is removed here
        cwd=tmp_path,
        **build_child_environment(given, "cpu", ROOT),
    )
    assert not finished.timed_out, finished.output[-3000:]
    return finished


def read_steps(output: str) -> list[dict[str, float]]:
    """Read the metrics of each step, as printed by verl's console logger or by the user's own logger."""
    steps = [{name: float(value) for name, value in METRIC.findall(line)} for line in STEP.findall(output)]
    return [step for step in steps if "offpolicy/live/proved" in step]


@pytest.mark.parametrize("name", EACH)
def test_it_trains_corrected_and_proved(
    name: str, run_program: Callable[..., Any], made: dict[str, Path], tmp_path: Path
) -> None:
    program = PROGRAMS[name]
    finished = launch(run_program, made, program, tmp_path)
    assert finished.returncode == 0, finished.output[-3000:]
    live = LIVE.search(finished.output)
    assert live, finished.output[-3000:]
    assert int(live[1]) == program.rows
    steps = read_steps(finished.output)
    assert len(steps) >= len(program.ages)
    for step, (least, greatest) in zip(steps, program.ages, strict=False):
        assert step["offpolicy/live/proved"] == 1.0
        assert step["offpolicy/delivery/proved"] == 1.0
        assert least <= step["offpolicy/staleness/max"] <= greatest
    if program.own_primary:  # what it says of our sections stays: every second step is recorded
        assert len(list((tmp_path / "recording").rglob("step_*"))) == STEPS // 2 + STEPS % 2


@pytest.mark.parametrize("name", EACH)
def test_workers_with_another_loss_stop_it(
    name: str, run_program: Callable[..., Any], made: dict[str, Path], tmp_path: Path
) -> None:
    finished = launch(run_program, made, PROGRAMS[name], tmp_path, VERL_USE_EXTERNAL_MODULES="tests.support.other_loss")
    assert finished.returncode != 0
    assert "LivenessError" in finished.output, finished.output[-3000:]
    assert not read_steps(finished.output)


@pytest.mark.verl(">=0.8")
@pytest.mark.parametrize("name", ["fully_async", "one_step_off"])
def test_an_engine_that_cannot_load_weights_ends_it(
    name: str, run_program: Callable[..., Any], made: dict[str, Path], tmp_path: Path
) -> None:
    faults = {"VERL_USE_EXTERNAL_MODULES": "tests.support.faults", "OFFPOLICY_FAULT": "failing_load:1"}
    watched = replace(PROGRAMS[name], overrides=(*PROGRAMS[name].overrides, "offpolicy.watchdog.poll=5"))
    finished = launch(run_program, made, watched, tmp_path, **faults)
    assert finished.returncode != 0
    told = r"has failed: rollout server 0 could not run update_weights.*KeyError: 'layers\.7\.unknown'"
    assert re.search(told, finished.output), finished.output[-3000:]


LORA = ("lora_rank=8", "lora_alpha=16", "lora.merge=true")


@pytest.mark.verl(">=0.9.1")  # snapshots of weights
@pytest.mark.parametrize("stale", [False, True], ids=["delivered", "stale"])
def test_merged_lora_reaches_the_rollout_engine(
    stale: bool, run_program: Callable[..., Any], made: dict[str, Path], tmp_path: Path
) -> None:
    """The weights of the last update are closest to mu, unless the engine is made to keep its first weights."""
    keys = tuple(f"actor_rollout_ref.model.{key}" for key in LORA)
    # LoRA's own learning rate: an update moves log-probs several times as far as the engines are apart.
    watched = (
        "offpolicy.late_weights.snapshots=3",
        "offpolicy.delivery.sums=null",
        "offpolicy.delivery.probe=null",
        "actor_rollout_ref.actor.optim.lr=3e-3",
    )
    faults = {"VERL_USE_EXTERNAL_MODULES": "tests.support.faults", "OFFPOLICY_FAULT": "stale_weights:2"}
    program = Program(V1, (SIXTEEN, *keys, *watched))
    finished = launch(run_program, made, program, tmp_path, **(faults if stale else {}))
    assert finished.returncode == 0, finished.output[-3000:]
    assert LIVE.search(finished.output), finished.output[-3000:]
    steps = read_steps(finished.output)
    assert [step["offpolicy/late_weights/lag"] for step in steps] == ([0.0, 1.0, 2.0] if stale else [0.0] * STEPS)
