"""Seams that do not hold stop a launch, with the release of verl."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest

import verl_patches
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.problem import CheckError
from recipe.offpolicy.preflight.checks.seams import check_seams, check_seams_with, demand_seams
from recipe.offpolicy.preflight.checks.workers_env import list_patch_groups
from tests.support.applications import NEEDED, application
from verl_patches import (
    engine_loss,
    llm_client,
    replay_buffer,
    router_replay,
    trainer_v0,
    trainer_v1,
    truncated_sampling,
)
from verl_patches.contract import Contract, PatchError
from verl_patches.execution_path import LivePath


@pytest.mark.parametrize(("trainer", "module"), [("v0", trainer_v0), ("v1", trainer_v1)])
def test_the_seams_of_the_path_are_held(trainer: str, module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_patches, "status", dict)
    held: list[object] = []
    assert list(check_seams_with(LivePath("0.9.1", trainer, "engine", "fsdp"), held.append)) == []
    assert held == [engine_loss.SEAMS, module.SEAMS]


@pytest.mark.parametrize(("release", "more"), [("0.9.1", [replay_buffer.SEAMS]), ("0.9.0", [])])
def test_a_limit_of_staleness_has_seams_of_its_own(
    release: str, more: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the releases on which it is not refused anyway."""
    monkeypatch.setattr(verl_patches, "status", dict)
    held: list[object] = []
    assert list(check_seams_with(LivePath(release, "v1", "engine", "fsdp"), held.append, bounded=True)) == []
    assert held == [engine_loss.SEAMS, trainer_v1.SEAMS, *more]


def test_versions_by_token_have_seams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_patches, "status", dict)
    held: list[object] = []
    assert list(check_seams_with(LivePath("0.9.1", "v1", "engine", "fsdp"), held.append, noted=True)) == []
    assert held == [engine_loss.SEAMS, trainer_v1.SEAMS, llm_client.SEAMS]


def test_routing_replay_has_seams_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_patches, "status", dict)
    held: list[object] = []
    assert list(check_seams_with(LivePath("0.9.1", "v1", "engine", "fsdp"), held.append, replayed=True)) == []
    assert held == [engine_loss.SEAMS, trainer_v1.SEAMS, router_replay.SEAMS]
    held.clear()
    assert list(check_seams_with(LivePath("0.9.1", "v0", "engine", "fsdp"), held.append, supported=True)) == []
    assert held == [engine_loss.SEAMS, trainer_v0.SEAMS, truncated_sampling.SEAMS]


def test_a_seam_that_has_moved_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_patches, "status", dict)

    def hold(contracts: Sequence[Contract]) -> None:
        raise PatchError("set_loss_fn has moved")

    (problem,) = check_seams_with(LivePath("0.9.1", "v1", "engine", "fsdp"), hold)
    assert (problem.key, problem.value, problem.reason) == ("verl", "0.9.1", "set_loss_fn has moved")


@pytest.mark.slow
def test_the_process_that_trains_looks_at_what_it_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that replaces a seam is not in verl's source, by which the launch was checked."""
    pytest.importorskip("verl")
    from verl.workers.engine_workers import TrainingWorker

    with application("correction=gsm", *NEEDED) as config:
        demand_seams(config)
        monkeypatch.setattr(TrainingWorker, "train_mini_batch", lambda self, batch: None)
        assert list(check_seams(config, CorrectionSpec())) == []
        with pytest.raises(CheckError, match="train_mini_batch") as caught:
            demand_seams(config)
    sent = pickle.loads(pickle.dumps(caught.value))
    assert (str(sent), sent.problems) == (str(caught.value), caught.value.problems)


def test_legacy_workers_load_the_patches_of_their_actors() -> None:
    assert list_patch_groups(LivePath("0.7.1", "v0", "legacy", "fsdp")) == ["legacy"]
    assert list_patch_groups(LivePath("0.7.1", "v0", "engine", "fsdp")) == []
