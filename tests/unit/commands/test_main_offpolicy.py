"""The command rejects a launch before Ray starts, with an exit status that scripts can read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.applications import NEEDED
from tests.support.corrections import GSM, TIS, spec
from tests.support.launched import REFUSED, Launch, Launcher
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("each_actor_is_probed_once")


def ours(result: Launch) -> list[str]:
    """Return those lines of the output that are ours."""
    return [line.removeprefix("offpolicy: ") for line in result.printed.split("\n") if line.startswith("offpolicy: ")]


@pytest.mark.slow
def test_check_alone_does_not_train(launch: Launcher) -> None:
    result = launch("--check", "correction=[tis_token,gsm]", *NEEDED)
    assert result.status == 0
    assert ours(result)[0] == (
        "correction=[tis_token,gsm]: weight (token, truncate <= 2 on pi_old / mu), "
        "masks.gsm (sequence, geometric [0.99, 1.01] on pi_old / mu)"
    )
    assert "all checks passed" in result.printed
    assert str(spec(TIS, gsm=GSM).fingerprint()) in result.printed
    assert result.trained == []


@pytest.mark.slow
def test_a_check_asks_verl_and_the_workers_environment(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check stops where the launch would be stopped, before Ray starts."""
    monkeypatch.setenv("OFFPOLICY_X", "1")
    variable = "ray_kwargs.ray_init.runtime_env.env_vars.OFFPOLICY_X"
    for change, part in (
        ("actor_rollout_ref.actor.ppo_mini_batch_size=2048", "verl's own validation rejects it: train_batch_size"),
        (f"++{variable}=2", f"{variable}='2': workers need OFFPOLICY_X=1"),
        ("actor_rollout_ref.actor.policy_loss=null", "actor_rollout_ref.actor.policy_loss=null: this section"),
    ):
        result = launch("--check", "correction=gsm", change, *NEEDED)
        assert isinstance(result.status, str)
        assert result.status.startswith(REFUSED)
        assert part in result.status
    assert launch("--check", "correction=gsm", f"++{variable}=1", *NEEDED).status == 0


# The command itself, in a process of its own ----------------------------------------------------------------


def command(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m recipe.offpolicy.main_offpolicy`` in another directory, where Ray would leave its traces."""
    return program(cwd, [sys.executable, "-m", "recipe.offpolicy.main_offpolicy", *arguments])


def program(cwd: Path, words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(cwd), "PYTHONWARNINGS": "ignore", "PATH": path}
    return subprocess.run(
        words, cwd=cwd, env={**os.environ, **environment, **variables}, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_launch_that_is_refused_leaves_no_trace_of_ray(tmp_path: Path) -> None:
    done = command(
        tmp_path,
        "correction=[tis_token,opsm]",
        "correction.masks.opsm.delta=0.1",
        "distillation.enabled=true",
        "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
        "algorithm.rollout_correction.rollout_is=token",
        *NEEDED,
    )
    assert done.returncode == 1
    for part in (
        REFUSED,
        "distillation.enabled=true: ",
        "loss_mode=geo_mean",
        "No override corrects geo_mean",
        "algorithm.rollout_correction.rollout_is=token: ",
    ):
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("**/session_*")), "Ray was started"
