"""What the quickstart does for each release of verl."""

from __future__ import annotations

import pytest

from scripts.quickstart.options import build_release_overrides
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("platform", "release", "option"),
    [
        ("cpu", "0.7.1", "cpu_before_0_9"),
        ("cpu", "0.9.1", "cpu"),
        ("cpu_megatron", "0.9.1", "cpu_megatron"),
    ],
)
def test_the_platform_is_chosen_by_the_release(platform: str, release: str, option: str) -> None:
    assert build_release_overrides(platform, release)[0] == f"platform={option}"
    assert (ROOT / "configs" / "platform" / f"{option}.yaml").is_file()


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["correction=gsm"], ["custom_sampler.path", "custom_sampler.name"]),
        (["+mode=separate_async_cpu"], []),
        (["+mode=separate_async_cpu", "trainer.v1.trainer_mode=sync"], ["custom_sampler.path", "custom_sampler.name"]),
        (["offpolicy.staleness.eta=2"], ["custom_sampler.path", "custom_sampler.name"]),
        (
            ["+mode=separate_async_cpu", "offpolicy.staleness.eta=2"],
            ["separate_async.num_warmup_batches=null", "sampler.max_off_policy_threshold=null"],
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
