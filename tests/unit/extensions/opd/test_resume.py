"""A run that resumes a checkpoint distils as the one before did, or is refused by the names of what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.opd.distillation import OnPolicyDistillation
from recipe.offpolicy.fault_tolerance.checkpoints import (
    TRACKER,
    CheckpointError,
    check_before_loading,
    extension_states,
    guard_save,
)

SPEC = CorrectionSpec()
TEACHER = {"url": "http://one:8100", "timeout": 60}


def hooks(**changes: Any) -> AddOns:
    settings = {"mode": "advantage", "teacher": TEACHER, "coef": None, "eligible": {"max_pass_rate": 0.25}} | changes
    return AddOns([OnPolicyDistillation("opd", settings)])


def config(folder: Path, **ours: Any) -> DictConfig:
    trainer = {"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None}
    return OmegaConf.create({"trainer": trainer, "offpolicy": {"resume_changed_correction": False} | ours})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a run with mode advantage, as it is written next to verl's own files."""
    with guard_save(config(tmp_path), 4, SPEC, extensions=hooks().state):
        (tmp_path / "global_step_4").mkdir()
        (tmp_path / TRACKER).write_text("4")
    return tmp_path


def resume(folder: Path, now: AddOns, **ours: Any) -> None:
    made = config(folder, **ours)
    check_before_loading(made, SPEC, of_extensions=now.differences)
    now.restore(*extension_states(made))


def test_the_same_settings_go_on_with_a_teacher_at_another_address(checkpoint: Path) -> None:
    resume(checkpoint, hooks())
    resume(checkpoint, hooks(teacher={"url": ["http://two:8100", "http://three:8100"]}))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (hooks(mode="loss"), ['opd.mode: "advantage" in the checkpoint, "loss" now']),
        (
            hooks(coef=0.5, eligible={"max_pass_rate": 0.5}),
            [
                "opd.coef: null in the checkpoint, 0.5 now",
                "opd.eligible.max_pass_rate: 0.25 in the checkpoint, 0.5 now",
            ],
        ),
        (AddOns(), ['opd.mode: "advantage" in the checkpoint, not there now']),
    ],
    ids=["mode", "two keys", "off"],
)
def test_others_are_refused_by_name_unless_they_are_meant(now: AddOns, said: list[str], checkpoint: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        resume(checkpoint, now)
    assert [line for line in said if line not in str(refused.value)] == []
    assert "offpolicy.resume_changed_correction=true" in str(refused.value)
    resume(checkpoint, now, resume_changed_correction=True)
