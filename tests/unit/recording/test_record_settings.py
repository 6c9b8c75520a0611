"""``offpolicy.record``: accepted values, and errors with their fixes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.recording.files import MOST_REASONS
from recipe.offpolicy.recording.run import FOREIGN, RecordSettings, find_problems, find_too_many_parts, resolve_dir
from tests.support.corrections import GSM, TIS, spec
from tests.support.paths import ROOT
from tests.support.recordings import drawn_rows, record

DEFAULTS = OmegaConf.load(ROOT / "configs" / "offpolicy_base.yaml").offpolicy.record


def config(tmp_path: Path, *, mu: bool = True, resume: str = "auto", **values: Any) -> DictConfig:
    return OmegaConf.create(
        {
            "offpolicy": {"record": {**DEFAULTS, **values}},
            "actor_rollout_ref": {"rollout": {"calculate_log_probs": mu}},
            "trainer": {
                "default_local_dir": str(tmp_path / "checkpoints"),
                "resume_mode": resume,
                "resume_from_path": str(tmp_path / "checkpoints" / "global_step_4"),
            },
        }
    )


def test_a_relative_directory_is_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = config(tmp_path, dir="rec")
    resolve_dir(given)
    monkeypatch.chdir("/")
    assert RecordSettings.from_config(given) == RecordSettings.at(str(tmp_path / "rec"))
    nothing = config(tmp_path)
    resolve_dir(nothing)
    assert nothing.offpolicy.record.dir is None


def test_without_the_engines_log_probs_there_is_nothing_to_record(tmp_path: Path) -> None:
    (problem,) = find_problems(config(tmp_path, dir=str(tmp_path / "rec"), mu=False))
    assert problem.key == "offpolicy.record.dir"
    assert "no mu" in problem.reason
    assert problem.overrides == ("actor_rollout_ref.rollout.calculate_log_probs=true",)
    assert list(find_problems(config(tmp_path, mu=False))) == []


def test_more_parts_than_a_file_can_tell_apart(tmp_path: Path) -> None:
    """A rejecting weight counts as a part, a truncating weight does not."""
    place = str(tmp_path / "rec")
    recorded, nothing = config(tmp_path, dir=place), config(tmp_path)
    masks = {f"m{number}": GSM for number in range(MOST_REASONS)}
    rejects = TIS | {"kind": "reject"}
    assert list(find_too_many_parts(recorded, spec(TIS, **masks))) == []
    (problem,) = find_too_many_parts(recorded, spec(rejects, **masks))
    assert (problem.key, problem.value) == ("offpolicy.record.dir", place)
    assert problem.reason == "33 parts of the correction can reject, but a recording distinguishes only 32."
    assert problem.fix == "Set offpolicy.record.dir=null, or configure fewer masks."
    assert len(list(find_too_many_parts(recorded, spec(None, **masks, one_more=GSM)))) == 1
    assert list(find_too_many_parts(nothing, spec(rejects, **masks))) == []


# Recordings that are there already --------------------------------------------------------------------------------


def recording(tmp_path: Path, checkpoints: str = "checkpoints") -> str:
    folder = record(tmp_path / "rec", drawn_rows([2]))
    (folder / "run.json").write_text(json.dumps({"checkpoints": str(tmp_path / checkpoints)}))
    return str(folder)


REFUSED = (
    "the directory contains the recording of another run, and this run does not resume a checkpoint of that run.",
    FOREIGN,
)


def test_a_new_run_leaves_a_recording_alone(tmp_path: Path) -> None:
    (problem,) = find_problems(config(tmp_path, dir=recording(tmp_path)))
    assert (problem.reason, problem.fix) == REFUSED


def begun(tmp_path: Path, **card: Any) -> DictConfig:
    """A run that wrote its card and one step but no checkpoint is launched again."""
    place = recording(tmp_path)
    written = {"checkpoints": str(tmp_path / "checkpoints"), "config": {"trainer": {"save_freq": 10}}} | card
    (Path(place) / "run.json").write_text(json.dumps(written))
    return config(tmp_path, dir=place)


def test_a_run_cut_short_before_its_first_checkpoint_may_begin_again(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in (tmp_path, tmp_path / "link", tmp_path / "nowhere" / ".."):
        assert list(find_problems(begun(tmp_path, checkpoints=str(folder / "checkpoints")))) == []
    assert list(find_problems(config(tmp_path, dir=str(tmp_path / "rec"), resume="disable"))) != []
