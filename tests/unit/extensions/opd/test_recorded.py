"""What a recording of a distilled run holds, and what a replay and a report say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from tensordict import TensorDict

from recipe.offpolicy.analysis.whatif.candidates import RECORDED, Candidate
from recipe.offpolicy.analysis.whatif.study import run_study
from recipe.offpolicy.batch.plan import PLAN, SharedPlan, UpdateRows
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.opd.signal import ROW, TEACHER
from recipe.offpolicy.recording import Recording
from recipe.offpolicy.recording.recorder import flush_all
from recipe.offpolicy.recording.run import RecordSettings, RunRecord
from tests.support.corrections import TIS
from tests.support.distilled import Run, opinion
from tests.support.fake_teacher import FakeTeacher, serving
from verl.utils import tensordict_utils as tu

SPEC = CorrectionSpec.from_mapping({"weight": TIS})
AS_RECORDED = Candidate(RECORDED, RECORDED)


def config(folder: Path) -> Any:
    return OmegaConf.create(
        {
            "offpolicy": {"record": {"dir": str(folder)}},
            "actor_rollout_ref": {
                "model": {"path": "/models/small"},
                "actor": {"ppo_epochs": 1, "strategy": "fsdp2", "loss_agg_mode": "token-mean"},
                "rollout": {"name": "vllm", "temperature": 1.0},
            },
            "trainer": {"default_local_dir": str(folder.parent / "ckpt"), "resume_mode": "auto", "use_v1": True},
            "opd": {"mode": "loss"},
        }
    )


def recorded(folder: Path, mode: str) -> tuple[Run, Recording]:
    """One update of six rows under a recorder, with the card of its run."""

    def announce(data: TensorDict) -> None:
        tu.assign_non_tensor(data, **{PLAN: SharedPlan(1, update=UpdateRows(1, 6, 6, 0, 1, 0))})

    with serving(FakeTeacher(score=opinion)) as teacher:
        run = Run(teacher.url, mode)
    made = config(folder)
    settings = RecordSettings.from_config(made)
    assert settings is not None
    RunRecord(made, SPEC, {}, AddOns([run.opd]).describe())
    run.update(SPEC, announce, record=settings)
    flush_all()
    return run, Recording(folder)


def test_it_holds_the_teachers_log_probs_the_flag_and_the_settings(tmp_path: Path) -> None:
    run, recording = recorded(tmp_path / "run", "advantage")
    (step,) = recording
    rows = step.rows
    assert len(rows) == 6
    mask = rows.response_mask
    for row in range(6):
        at = slice(rows.offsets[row], rows.offsets[row + 1])
        length = int(rows.offsets[row + 1] - rows.offsets[row])
        shipped = run.batch.put_columns[TEACHER][row][:length].numpy()
        np.testing.assert_array_equal(rows.extensions[TEACHER][at], shipped)
        # The advantages that the loss had: the teacher's in eligible rows.
        wanted = run.advantages[row][:length].numpy()
        np.testing.assert_array_equal(rows.advantages[at][mask[at]], wanted[mask[at]])
        assert set(rows.extensions[ROW][at].tolist()) == {float(row < 2)}
    of_card = recording.card["extensions"]["opd"]
    assert of_card["meaning"].startswith(
        "advantage, coef=1, failed rollouts of prompts with a pass rate of at most 0.4"
    )
    assert of_card["columns"].keys() == {TEACHER, ROW}


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (
            "loss",
            "opd: its loss term, 0.01 K2 of eligible tokens, is not replayed: the figures show only the policy term.",
        ),
        ("advantage", "opd: advantages of eligible tokens were computed from the teacher and the run's log pi_old"),
    ],
)
def test_a_replay_says_what_it_does_not_replay(mode: str, said: str, tmp_path: Path) -> None:
    _, recording = recorded(tmp_path / "run", mode)
    study = run_study(recording, [1], [AS_RECORDED])
    assert study.fidelity.agrees
    assert study.fidelity.tokens
    assert [note for note in study.notes if note.startswith(said)]
