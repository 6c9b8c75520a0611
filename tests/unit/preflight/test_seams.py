"""Hooks whose targets have changed stop a launch, and the error names the release of verl."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

import verl_patches
from recipe.offpolicy.correction.problem import CheckError
from recipe.offpolicy.preflight.checks.path import check_seams, check_seams_by, demand_seams
from recipe.offpolicy.preflight.composed import Composed
from recipe.offpolicy.preflight.python_source import check_contracts, holds_in_source
from tests.support.applications import NEEDED, application
from verl_patches import rollout_seams, trainer_seams, worker_seams
from verl_patches.contract import Contract, PatchError, installed_release
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
        (LivePath("0.9.1", "v0", "engine", "fsdp"), {}, [trainer_seams.V0]),
        (OF_0_9_1, {}, [trainer_seams.V1]),
        (OF_0_9_1, {"staleness": ASKED}, [trainer_seams.V1, trainer_seams.STALENESS]),
        # Of the releases on which it is not refused anyway.
        (LivePath("0.9.0", "v1", "engine", "fsdp"), {"staleness": ASKED}, [trainer_seams.V1]),
        (OF_0_9_1, {"notes_token_versions": True}, [trainer_seams.V1, rollout_seams.VERSIONS]),
        (OF_0_9_1, {"support": ASKED}, [trainer_seams.V1, rollout_seams.SUPPORT]),
    ],
)
def test_the_seams_of_a_path_and_of_its_features_are_held(
    path: LivePath, features: dict[str, Any], more: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verl_patches, "status", dict)
    held: list[object] = []
    assert list(check_seams_by(held.append, on(path, **features))) == []
    assert held == [worker_seams.LOSS, *more]


def test_a_seam_that_has_moved_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_patches, "status", dict)

    def hold(contracts: Sequence[Contract]) -> None:
        raise PatchError("set_loss_fn has changed")

    (problem,) = check_seams_by(hold, on(OF_0_9_1))
    assert (problem.key, problem.value, problem.reason) == ("verl", "0.9.1", "set_loss_fn has changed")


@pytest.mark.slow
def test_the_process_that_trains_looks_at_what_it_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that replaces a target is not in verl's source, which was checked before the launch."""
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


# Contracts read in verl's source agree with contracts held by importing it, and have no last word of their own


pytest.importorskip("verl")


OF_V1 = [*trainer_seams.V1, *trainer_seams.STALENESS, *rollout_seams.VERSIONS, *worker_seams.ROUTER_REPLAY]
SEAMS = [*worker_seams.LOSS, *trainer_seams.V0, *OF_V1]
HERE = [seam for seam in SEAMS if seam.covers(installed_release("verl") or "0")]


@pytest.mark.slow
@pytest.mark.parametrize("seam", HERE, ids=lambda seam: seam.name)
def test_every_seam_of_this_release_is_seen_in_the_source(seam: Contract) -> None:
    assert holds_in_source(seam)
    seam.check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"keys": ("no_such_key",)}, "no_such_key"),
        ({"target": f"{HERE[0].target}_not"}, "nothing of that name"),
        ({"releases": "==0.1.0"}, r"was tested with verl==0\.1\.0"),
    ],
)
def test_what_is_gone_is_seen_and_left_to_the_import(change: dict[str, Any], said: str) -> None:
    gone = replace(HERE[0], **change)
    assert not holds_in_source(gone)
    with pytest.raises(PatchError, match=said):
        check_contracts([gone])


def test_what_a_module_makes_when_it_runs_is_left_to_the_import() -> None:
    """A name that the source does not bind may still exist at run time."""
    made = Contract("made", "verl.workers.utils.losses:get_policy_loss_fn", None, "verl", HERE[0].releases)
    assert not holds_in_source(made), "imported there from elsewhere"
    check_contracts([made])
