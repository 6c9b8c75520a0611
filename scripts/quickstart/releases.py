"""What differs between the supported releases of verl."""

from __future__ import annotations

from pathlib import Path

from options import override

from verl_patches.releases import attributes_of

HERE = Path(__file__).resolve().parent


def platform_option(platform: str, release: str) -> str:
    """The option of the group `platform` in configs/ for one of options.PLATFORMS."""
    return "cpu_before_0_9" if platform == "cpu" and not attributes_of(release).platforms else platform


def overrides(release: str) -> list[str]:
    """Hydra overrides for keys that only this release has."""
    if not attributes_of(release).v1_modes:
        return []
    return [
        override("trainer.v1.sampler.custom_sampler.path", HERE / "sampler.py"),
        "trainer.v1.sampler.custom_sampler.name=QuickReplayBuffer",
    ]
