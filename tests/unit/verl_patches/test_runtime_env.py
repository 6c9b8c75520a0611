"""What Ray's workers receive from the driver's environment, the user's configuration and the job."""

from __future__ import annotations

import json
import os

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.support.paths import ROOT
from verl_patches.runtime_env import ContradictionError, forward, merged, wanted

MODULES = "VERL_USE_EXTERNAL_MODULES"
CPU = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", MODULES: "verl_patches.cpu"}


def configuration(**ray_init: object) -> DictConfig:
    """As Hydra hands it over: missing keys cannot simply be set."""
    config = OmegaConf.create({"ray_kwargs": {"ray_init": {"num_cpus": None, **ray_init}}})
    OmegaConf.set_struct(config, True)
    return config


def in_job(**job: object) -> dict[str, str]:
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": job})}


def variables(config: DictConfig) -> object:
    return OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars)


def test_what_a_worker_wants() -> None:
    environ = {**CPU, "OFFPOLICY_ALLOW_UNTESTED_VERL": "1", "HOME": "/root", "VERL_USE_MODELSCOPE": "true"}
    assert wanted(environ) == {**CPU, "OFFPOLICY_ALLOW_UNTESTED_VERL": "1"}
    # A group that is in force here and was asked for by no one is named once, after what was.
    assert wanted(environ, ["cpu", "legacy"])[MODULES] == "verl_patches.cpu,verl_patches.legacy"
    assert wanted({}, ["legacy"]) == {MODULES: "verl_patches.legacy"}
    assert wanted({}) == {}


def test_lists_are_joined_and_the_users_own_come_first() -> None:
    given = {MODULES: "mine, verl_patches.cpu", "PYTHONPATH": "/mine", "NCCL_DEBUG": "INFO"}
    needed = {MODULES: "verl_patches.cpu,verl_patches.legacy", "PYTHONPATH": "/checkout", "VERL_PLATFORM": "cpu"}
    assert merged(given, needed, {}) == {
        MODULES: "mine,verl_patches.cpu,verl_patches.legacy",
        "PYTHONPATH": os.pathsep.join(["/mine", "/checkout"]),
        "NCCL_DEBUG": "INFO",
        "VERL_PLATFORM": "cpu",
    }
    assert given[MODULES] == "mine, verl_patches.cpu", "the user's mapping is left as it is"


def test_a_users_value_that_contradicts_stops() -> None:
    with pytest.raises(ContradictionError) as error:
        merged({"VERL_PLATFORM": "cuda"}, {"VERL_PLATFORM": "cpu"}, {})
    assert str(error.value) == (
        "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM=cuda: workers need VERL_PLATFORM=cpu, as in this "
        "process. Fix: Remove this override, or start this process with VERL_PLATFORM=cuda."
    )
    found = (error.value.key, error.value.value)
    assert found == ("ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM", "cuda")
    assert merged({"VERL_PLATFORM": "cpu"}, {"VERL_PLATFORM": "cpu"}, {}) == {"VERL_PLATFORM": "cpu"}


def test_what_the_job_has_is_left_out() -> None:
    """Ray rejects a variable that is set in both places, even to the same value."""
    job = {**CPU, MODULES: "other,verl_patches.cpu", "PYTHONPATH": "/job"}
    assert merged({}, {**CPU, "PYTHONPATH": "/checkout", "OFFPOLICY_X": "1"}, job) == {"OFFPOLICY_X": "1"}


@pytest.mark.parametrize(
    ("job", "fix"),
    [
        (
            {MODULES: "verl_patches.cpu"},
            f"Submit the job with {MODULES}=verl_patches.cpu,verl_patches.legacy",
        ),
    ],
)
def test_a_job_that_contradicts_stops_unless_ray_lets_the_driver_win(job: dict[str, str], fix: str) -> None:
    needed = {MODULES: "verl_patches.legacy", "VERL_PLATFORM": "cpu"}
    with pytest.raises(ContradictionError) as error:
        merged({}, needed, job)
    assert str(error.value).endswith(f"Fix: {fix}, or set RAY_OVERRIDE_JOB_RUNTIME_ENV=1.")
    ((key, value),) = job.items()
    assert f"{key}={value} of the submitted job" in str(error.value)
    won = merged({}, needed, job, may_override=True)
    expected = {MODULES: "verl_patches.cpu,verl_patches.legacy", "VERL_PLATFORM": "cpu"}
    assert won[key] == expected[key]


def test_forward_completes_a_configuration() -> None:
    for given in ({}, {"runtime_env": None}, {"runtime_env": {"py_executable": "python"}}):
        config = configuration(**given)
        forward(config, environ=CPU)
        assert variables(config) == {**CPU, "PYTHONPATH": str(ROOT)}
    assert config.ray_kwargs.ray_init.runtime_env.py_executable == "python", "the rest stays"
    assert config.ray_kwargs.ray_init.num_cpus is None


def test_forward_in_a_job_leaves_the_files_to_the_job() -> None:
    config = configuration()
    forward(config, environ={**CPU, **in_job(working_dir="gcs://files.zip", env_vars=CPU)})
    assert "runtime_env" not in config.ray_kwargs.ray_init, "nothing is left to say"
    config = configuration()
    forward(config, environ={**CPU, **in_job(env_vars={"VERL_PLATFORM": "cpu"})})
    assert variables(config) == {
        "VERL_ENGINE_DEVICE": "cuda",
        MODULES: "verl_patches.cpu",
        "PYTHONPATH": str(ROOT),
    }
