"""A checkpoint is complete or known to be incomplete, the previous one still exists, and a changed correction is
reported.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.fault_tolerance.checkpoints import (
    RECORD,
    SAVING,
    TRACKER,
    CheckpointError,
    check_before_loading,
    guard_save,
)

TIS = {"weight": {"level": "token", "kind": "truncate", "lower": None, "upper": 2.0}}
SPEC = CorrectionSpec.from_mapping(TIS)


def config(folder: Path, **trainer: Any) -> DictConfig:
    values = {"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None} | trainer
    return OmegaConf.create({"trainer": values, "offpolicy": {"resume_changed_correction": False}})


def by_path(folder: Path, step: int) -> DictConfig:
    return config(folder, resume_mode="resume_path", resume_from_path=str(folder / f"global_step_{step}"))


class Killed(BaseException):
    """The process ended here."""


def save(folder: Path, step: int, *, until: str = "", spec: CorrectionSpec = SPEC, **trainer: Any) -> None:
    """Write what verl 0.9.1 writes, in its order, and stop before ``until``."""

    def writes(name: str, path: Path, text: str) -> None:
        if until == name:
            raise Killed
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    checkpoint = folder / f"global_step_{step}"
    try:
        with guard_save(config(folder, **trainer), step, spec):
            writes("actor", checkpoint / "actor" / "model.pt", f"weights of {step}")
            writes("data", checkpoint / "data.pt", "")
            writes("tracker", folder / TRACKER, str(step))
            writes("end", checkpoint / "data.pt", "")
    except Killed:
        pass


def to_resume(folder: Path, **trainer: Any) -> str:
    """Return the step that verl would resume, by its own rule."""
    check_before_loading(config(folder, **trainer), SPEC)
    return (folder / TRACKER).read_text()


def test_a_whole_checkpoint_is_recorded(tmp_path: Path) -> None:
    save(tmp_path, 4)
    record = json.loads((tmp_path / "global_step_4" / RECORD).read_text())
    assert record == {"step": 4, "complete": True, "fingerprint": SPEC.fingerprint(), "correction": SPEC.to_mapping()}
    assert not (tmp_path / SAVING).exists()
    assert to_resume(tmp_path) == "4"


@pytest.mark.parametrize("until", ["actor", "tracker"])
def test_ended_in_the_midst_the_previous_one_is_resumed(
    tmp_path: Path, until: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4, until=until)
    with caplog.at_level(logging.WARNING):
        assert to_resume(tmp_path) == "2"
    assert "checkpoint of step 4 is incomplete; resuming from step 2" in caplog.text
    check_before_loading(by_path(tmp_path, 2), SPEC)


def test_what_was_cut_short_cannot_be_asked_for_by_path(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4, until="data")
    with pytest.raises(CheckpointError, match=r"global_step_4: writing it was interrupted.*global_step_2 is complete"):
        check_before_loading(by_path(tmp_path, 4), SPEC)


def test_a_step_that_was_being_written_over_is_not_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    # A run that resumed step 2 by path comes to step 4 again; the tracker names it all the while.
    save(tmp_path, 4, until="data")
    with caplog.at_level(logging.WARNING):
        assert to_resume(tmp_path) == "2"
    assert "global_step_4: writing it was interrupted; resuming from step 2" in caplog.text


def test_a_tracker_without_a_number_is_mended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 2)
    save(tmp_path, 10)
    (tmp_path / TRACKER).write_text("")
    with caplog.at_level(logging.WARNING):
        assert to_resume(tmp_path) == "10"
    assert "contains no number; resuming from step 10" in caplog.text


@pytest.mark.parametrize(
    "keys",
    [
        {"max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": 1},
        {"max_actor_ckpt_to_keep": None, "max_critic_ckpt_to_keep": None, "remove_previous_ckpt_in_save": True},
    ],
)
def test_the_previous_one_is_kept_while_the_next_is_written(
    tmp_path: Path, keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run = config(tmp_path, **keys)
    with caplog.at_level(logging.WARNING), guard_save(run, 2, SPEC):
        assert run.trainer.max_actor_ckpt_to_keep == run.trainer.max_critic_ckpt_to_keep == 2
        assert not run.trainer.get("remove_previous_ckpt_in_save")
    assert "two checkpoints are kept" in caplog.text


def test_what_is_saved_asynchronously_is_whole_once_verl_names_it(tmp_path: Path) -> None:
    save(tmp_path, 2)
    asynchronous = config(tmp_path)
    asynchronous.actor_rollout_ref = {"actor": {"checkpoint": {"async_save": True}}}
    with guard_save(asynchronous, 4, SPEC):
        (tmp_path / "global_step_4").mkdir()
    with pytest.raises(CheckpointError, match="writing it was interrupted"):
        check_before_loading(by_path(tmp_path, 4), SPEC)
    (tmp_path / TRACKER).write_text("4")
    check_before_loading(by_path(tmp_path, 4), SPEC)
    assert to_resume(tmp_path) == "4"


def test_a_checkpoint_whose_weights_verl_has_deleted_is_not_resumed(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    (tmp_path / "global_step_4" / "actor").mkdir(exist_ok=True)
    for weights in (tmp_path / "global_step_4" / "actor").iterdir():
        weights.unlink()
    assert to_resume(tmp_path) == "2"
