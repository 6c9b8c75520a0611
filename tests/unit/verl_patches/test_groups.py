"""Groups of patches that an environment requests, and small readers of contracts."""

from __future__ import annotations

import pytest
import torch

import verl_patches
from verl_patches import asked_for, named
from verl_patches.legacy.handover import MINI_ROWS, MINI_TOKENS, mini_batch_columns


def test_groups_by_either_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_patches, "needed", lambda: ["legacy"])
    assert named({"OFFPOLICY_PATCHES": " cpu, auto,"}) == ["cpu", "auto"]
    assert asked_for({}) == []
    assert asked_for({"OFFPOLICY_PATCHES": "auto"}) == ["legacy"]
    assert asked_for({"OFFPOLICY_PATCHES": "cpu"}) == ["cpu"]
    assert asked_for({"VERL_USE_EXTERNAL_MODULES": "other,verl_patches.cpu"}) == ["cpu"]


def test_denominators_of_mini_batches_over_two_ranks() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [1, 0]])
    columns = mini_batch_columns(mask, 2, lambda counts: 2 * counts)
    # Mini-batches of 3 tokens in 2 rows and of 1 token in 1 row, twice.
    assert columns[MINI_TOKENS].tolist() == [6, 6, 2]
    assert columns[MINI_ROWS].tolist() == [4, 4, 2]
