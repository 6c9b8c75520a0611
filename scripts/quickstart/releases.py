"""What differs between the supported releases of verl."""

from __future__ import annotations

from pathlib import Path

from options import override
from packaging.version import Version

HERE = Path(__file__).resolve().parent
PLATFORMS_SINCE = Version("0.9")
"""From here on verl has platforms, of which one is the CPU, and the V1 trainer with its replay buffer."""


def platform_option(platform: str, release: str) -> str:
    """The option of the group `platform` in configs/ for one of options.PLATFORMS."""
    return "cpu_before_0_9" if platform == "cpu" and Version(release) < PLATFORMS_SINCE else platform


def overrides(release: str) -> list[str]:
    """Hydra overrides for keys that only this release has."""
    if Version(release) < PLATFORMS_SINCE:
        return []
    return [
        override("trainer.v1.sampler.custom_sampler.path", HERE / "sampler.py"),
        "trainer.v1.sampler.custom_sampler.name=QuickReplayBuffer",
    ]
