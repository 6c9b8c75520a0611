"""Groups of patches that an environment asks for, and small readers of contracts."""

from __future__ import annotations

import pytest

import verl_patches
from verl_patches import asked_for, named


def test_groups_by_either_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_patches, "needed", lambda: ["legacy"])
    assert named({"OFFPOLICY_PATCHES": " cpu, auto,"}) == ["cpu", "auto"]
    assert asked_for({}) == []
    assert asked_for({"OFFPOLICY_PATCHES": "auto"}) == ["legacy"]
    assert asked_for({"OFFPOLICY_PATCHES": "cpu"}) == ["cpu"]
    assert asked_for({"VERL_USE_EXTERNAL_MODULES": "other,verl_patches.cpu"}) == ["cpu"]
