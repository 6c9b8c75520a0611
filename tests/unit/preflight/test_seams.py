"""Seams that do not hold stop a launch, with the release of verl."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from omegaconf import OmegaConf

import verl_patches
from recipe.offpolicy.correction.problem import CheckError
from recipe.offpolicy.preflight.checks.path import check_seams, check_seams_by, demand_seams, list_patch_groups
from recipe.offpolicy.preflight.composed import Composed
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

FEATURES: dict[str, Any] = {"notes_token_versions": False, "staleness": None, "replay": None, "support": None}
OF_0_9_1, ASKED = LivePath("0.9.1", "v1", "engine", "fsdp"), object()


def on(path: LivePath, **features: Any) -> Composed:
    run = Composed(OmegaConf.create({}))
    vars(run).update({"path": path, **FEATURES, **features})
    return run


@pytest.mark.parametrize(
    ("path", "features", "more"),
    [
        (LivePath("0.9.1", "v0", "engine", "fsdp"), {}, [trainer_v0.SEAMS]),
        (OF_0_9_1, {}, [trainer_v1.SEAMS]),
        (OF_0_9_1, {"staleness": ASKED}, [trainer_v1.SEAMS, replay_buffer.SEAMS]),
        # Of the releases on which it is not refused anyway.
        (LivePath("0.9.0", "v1", "engine", "fsdp"), {"staleness": ASKED}, [trainer_v1.SEAMS]),
        (OF_0_9_1, {"notes_token_versions": True}, [trainer_v1.SEAMS, llm_client.SEAMS]),
        (OF_0_9_1, {"replay": ASKED}, [trainer_v1.SEAMS, router_replay.SEAMS]),
        (OF_0_9_1, {"support": ASKED}, [trainer_v1.SEAMS, truncated_sampling.SEAMS]),
        (LivePath("0.8.0", "v0", "engine", "fsdp"), {"support": ASKED}, [trainer_v0.SEAMS]),
    ],
)
def test_the_seams_of_a_path_and_of_its_features_are_held(
    path: LivePath, features: dict[str, Any], more: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verl_patches, "status", dict)
    held: list[object] = []
    assert list(check_seams_by(held.append, on(path, **features))) == []
    assert held == [engine_loss.SEAMS, *more]


def test_a_seam_that_has_moved_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_patches, "status", dict)

    def hold(contracts: Sequence[Contract]) -> None:
        raise PatchError("set_loss_fn has moved")

    (problem,) = check_seams_by(hold, on(OF_0_9_1))
    assert (problem.key, problem.value, problem.reason) == ("verl", "0.9.1", "set_loss_fn has moved")


@pytest.mark.slow
def test_the_process_that_trains_looks_at_what_it_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that replaces a seam is not in verl's source, by which the launch was checked."""
    pytest.importorskip("verl")
    from verl.workers.engine_workers import TrainingWorker

    with application("correction=gsm", *NEEDED) as config:
        demand_seams(config)
        monkeypatch.setattr(TrainingWorker, "train_mini_batch", lambda self, batch: None)
        assert list(check_seams(Composed(config))) == []
        with pytest.raises(CheckError, match="train_mini_batch") as caught:
            demand_seams(config)
    sent = pickle.loads(pickle.dumps(caught.value))
    assert (str(sent), sent.problems) == (str(caught.value), caught.value.problems)


def test_legacy_workers_load_the_patches_of_their_actors() -> None:
    assert list_patch_groups(LivePath("0.7.1", "v0", "legacy", "fsdp")) == ["legacy"]
    assert list_patch_groups(LivePath("0.7.1", "v0", "engine", "fsdp")) == []
