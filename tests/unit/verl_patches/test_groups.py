"""Groups of patches that an environment asks for, and small readers of contracts."""

from __future__ import annotations

import pytest
import torch

import verl_patches
from verl_patches import asked_for, named
from verl_patches.contract import is_needed, looked_up
from verl_patches.legacy.algorithms import behind
from verl_patches.legacy.handover import MINI_ROWS, MINI_TOKENS, mini_batch_columns
from verl_patches.releases import release_of
from verl_patches.runtime_env import joined
from verl_patches.worker_seams import complete


def test_groups_by_either_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_patches, "needed", lambda: ["legacy"])
    assert named({"OFFPOLICY_PATCHES": " cpu, auto,"}) == ["cpu", "auto"]
    assert asked_for({}) == []
    assert asked_for({"OFFPOLICY_PATCHES": "auto"}) == ["legacy"]
    assert asked_for({"OFFPOLICY_PATCHES": "cpu"}) == ["cpu"]
    assert asked_for({"VERL_USE_EXTERNAL_MODULES": "other,verl_patches.cpu"}) == ["cpu"]


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.8.0.dev", "0.8.0"),
        ("0.8.0.dev0", "0.8.0"),
        ("0.8.0+cpu", "0.8.0"),
        ("0.9.1\n", "0.9.1"),
        ("0.9.1.dev", "0.9.1.dev"),
    ],
)
def test_releases_by_what_they_call_themselves(version: str, release: str) -> None:
    assert release_of(version) == release


@pytest.mark.parametrize(
    ("module", "needed"), [("verl.trainer", True), ("recipe", True), ("verl_patches.x", True), ("vllm", False)]
)
def test_a_missing_module_of_verl_or_of_ours_is_needed(module: str, needed: bool) -> None:
    assert is_needed(ModuleNotFoundError(name=module)) is needed


def test_names_that_code_looks_up() -> None:
    def reads(batch: object) -> object:
        return [torch.zeros(1) for _ in batch.columns]  # type: ignore[attr-defined]

    assert {"torch", "zeros", "columns"} <= looked_up(reads)
    assert "reads" not in looked_up(reads)


def test_a_method_behind_a_wrapper_without_wraps() -> None:
    def update(self: object) -> int:
        return 1

    def logger(method: object) -> object:
        def wrapper(*args: object) -> object:
            return method(*args)  # type: ignore[operator]

        return wrapper

    assert behind(logger(update), "update") is update  # type: ignore[arg-type]
    assert behind(update, "update") is update
    assert behind(logger(update), "other") is None  # type: ignore[arg-type]


def test_lists_of_an_environment_are_joined_and_single_values_replaced() -> None:
    assert joined("VERL_USE_EXTERNAL_MODULES", "a,b", "b, c,") == "a,b,c"
    assert joined("VERL_PLATFORM", "cuda", "cpu") == "cpu"


def test_denominators_of_mini_batches_over_two_ranks() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [1, 0]])
    columns = mini_batch_columns(mask, 2, lambda counts: 2 * counts)
    # Mini-batches of 3 tokens in 2 rows and of 1 token in 1 row, twice.
    assert columns[MINI_TOKENS].tolist() == [6, 6, 2]
    assert columns[MINI_ROWS].tolist() == [4, 4, 2]


def test_whatever_waits_among_metrics_is_completed_once_each() -> None:
    class Waiting:
        calls = 0

        def before_sending(self) -> None:
            self.calls += 1

    one, two = Waiting(), Waiting()
    complete({"loss": 0.5, "offpolicy": [one, [two]], "other": None})
    assert (one.calls, two.calls) == (1, 1)
