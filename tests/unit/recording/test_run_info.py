"""What a run's card says, and which directories are another run's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.recording import RecordingError
from recipe.offpolicy.recording.recording import CARD, read_json
from recipe.offpolicy.recording.run_info import explain_foreign, find_resumed_folder, read_sampling


def config(folder: Path, **trainer: Any) -> DictConfig:
    values = {"default_local_dir": str(folder / "checkpoints"), "resume_mode": "auto", "resume_from_path": None}
    return OmegaConf.create({"trainer": values | trainer})


def test_the_engines_own_sampling_comes_last() -> None:
    engine = {"vllm": {"top_k": 5, "override_generation_config": {"min_p": 0.1}}}
    rollout = {"name": "vllm", "temperature": 0.7, "top_k": -1, "top_p": None, "engine_kwargs": engine}
    found = read_sampling(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}))
    assert found == {"engine": "vllm", "temperature": 0.7, "top_k": 5, "min_p": 0.1}


def test_a_replayed_support_is_part_of_the_sampling() -> None:
    values = {"correction": {"support": "engine", "support_unknown": "mask", "support_min_p": 0.1}}
    found = read_sampling(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}, **values}))
    assert found == {"engine": "vllm", "support": "engine", "support_unknown": "mask", "support_min_p": 0.1}


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


def test_a_directory_of_another_run_is_foreign(tmp_path: Path) -> None:
    folder = tmp_path / "rec"
    assert explain_foreign(str(folder), config(tmp_path)) is None
    folder.mkdir()
    assert explain_foreign(str(folder), config(tmp_path)) is None
    (folder / CARD).write_text(json.dumps({"checkpoints": str(tmp_path / "others")}))
    said = explain_foreign(str(folder), config(tmp_path))
    assert said is not None
    assert "the recording of another run" in said


def test_a_run_that_was_cut_short_before_its_first_checkpoint_goes_on(tmp_path: Path) -> None:
    saved = {"checkpoints": str(tmp_path / "checkpoints"), "config": {"trainer": {"save_freq": 5}}}
    (tmp_path / CARD).write_text(json.dumps(saved))
    assert explain_foreign(str(tmp_path), config(tmp_path)) is None
    assert explain_foreign(str(tmp_path), config(tmp_path, resume_mode="disable")) is not None


@pytest.mark.parametrize(("text", "message"), [("{", "not readable as JSON"), ("[]", "expected a JSON object")])
def test_a_card_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    assert read_json(tmp_path / CARD) == {}
    (tmp_path / CARD).write_text(text)
    with pytest.raises(RecordingError, match=message):
        read_json(tmp_path / CARD)
