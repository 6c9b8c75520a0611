"""What the quickstart does for each release of verl."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from scripts.quickstart.options import build_release_overrides
from tests.support.paths import ROOT
from verl_patches.releases import TESTED

SCRIPT = ["bash", str(ROOT / "scripts" / "quickstart.sh")]


@pytest.mark.parametrize(
    ("platform", "release", "option"),
    [
        ("cpu", "0.7.1", "cpu_before_0_9"),
        ("cpu", "0.8.0", "cpu_before_0_9"),
        ("cpu", "0.9.1", "cpu"),
        ("cuda", "0.7.1", "cuda"),
        ("cpu_megatron", "0.9.1", "cpu_megatron"),
    ],
)
def test_the_platform_is_chosen_by_the_release(platform: str, release: str, option: str) -> None:
    assert build_release_overrides(platform, release)[0] == f"platform={option}"
    assert (ROOT / "configs" / "platform" / f"{option}.yaml").is_file()


def test_only_releases_with_a_replay_buffer_are_told_of_one() -> None:
    """An override of a key that verl does not have would be refused."""
    assert build_release_overrides("cuda", "0.7.1") == build_release_overrides("cuda", "0.8.0") == ["platform=cuda"]
    keys = [text.partition("=")[0] for text in build_release_overrides("cpu", "0.9.1")]
    sampler = "trainer.v1.sampler.custom_sampler"
    assert keys == ["platform", f"{sampler}.path", f"{sampler}.name"]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["correction=gsm"], ["custom_sampler.path", "custom_sampler.name"]),
        (["+mode=separate_async_cpu"], []),
        (["trainer.v1.trainer_mode=colocate_async"], []),
        (["+mode=separate_async_cpu", "trainer.v1.trainer_mode=sync"], ["custom_sampler.path", "custom_sampler.name"]),
        (["offpolicy.staleness.eta=2"], ["custom_sampler.path", "custom_sampler.name"]),
        (
            ["+mode=separate_async_cpu", "offpolicy.staleness.eta=2"],
            ["separate_async.num_warmup_batches=null", "sampler.max_off_policy_threshold=null"],
        ),
        (["+mode=separate_async_cpu", "offpolicy.staleness.eta=2", "offpolicy.staleness.eta=null"], []),
        (
            ["trainer.v1.trainer_mode=colocate_async", "offpolicy.staleness.eta=0"],
            ["colocate_async.num_warmup_batches=null", "sampler.max_off_policy_threshold=null"],
        ),
    ],
)
def test_the_quick_buffer_is_for_synchronous_training_and_eta_replaces_verls_keys(
    overrides: list[str], keys: list[str]
) -> None:
    added = build_release_overrides("cpu", "0.9.1", overrides)[1:]
    assert len(added) == len(keys)
    assert all(key in override for key, override in zip(keys, added, strict=True))
    assert build_release_overrides("cpu", "0.7.1", overrides) == ["platform=cpu_before_0_9"]


def test_before_0_9_the_cpu_is_rays_gpu() -> None:
    """`trainer.device` names the resource of placement groups there, and none is called "cpu"."""
    config = yaml.safe_load((ROOT / "configs" / "platform" / "cpu_before_0_9.yaml").read_text())
    assert config["trainer"]["device"] == "cuda"
    assert config["defaults"][0] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--release", "0.6.0"], {}, f"release 0.6.0 of verl is not supported. Choose one of: {' '.join(TESTED)}"),
        (["--release=0.6.0"], {}, "release 0.6.0"),
        ([], {"RELEASE": "0.6.0"}, "release 0.6.0"),
        (["--release"], {}, "--release needs a release"),
        (["--release", "0.6.0"], {"VENV": sys.prefix}, "not 0.6.0"),
    ],
)
def test_a_release_that_cannot_be_is_refused(arguments: list[str], environment: dict[str, str], message: str) -> None:
    done = subprocess.run(
        [*SCRIPT, *arguments], env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr
