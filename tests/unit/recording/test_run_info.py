"""The content of a run's card, the owner of its directory, and the recorder's report for each micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.recording.run import find_resumed_folder


def config(folder: Path, **trainer: Any) -> DictConfig:
    values = {"default_local_dir": str(folder / "checkpoints"), "resume_mode": "auto", "resume_from_path": None}
    return OmegaConf.create({"trainer": values | trainer})


def test_which_checkpoints_a_run_resumes(tmp_path: Path) -> None:
    assert find_resumed_folder(config(tmp_path)) is None
    by_path = config(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path / "old" / "global_step_3"))
    assert find_resumed_folder(by_path) == str(tmp_path / "old")
    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir()
    for written in ("3", ""):  # a number, and one whose writing was interrupted
        tracker.write_text(written)
        assert find_resumed_folder(config(tmp_path)) == str(tmp_path / "checkpoints")
    assert find_resumed_folder(config(tmp_path, resume_mode="disable")) is None
