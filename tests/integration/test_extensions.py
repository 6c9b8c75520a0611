"""Two extensions together with a correction in whole runs: rewards, advantages, loss, reports and recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe.offpolicy.recording import Recording
from tests.support.whole_runs import train

pytestmark = [pytest.mark.slow, pytest.mark.extended]

TWO = (
    "offpolicy.extensions.nudge=tests.support.nudge:Nudge",
    "offpolicy.extensions.sway=tests.support.nudge:Nudge",
    "+nudge.bonus=0.01",
    "+nudge.tilt=0.01",
    "+nudge.coef=0.001",
    "+sway.bonus=0.0",
    "+sway.tilt=-0.02",
    "+sway.coef=0.002",
)


@pytest.mark.parametrize("trainer", [pytest.param("true", id="v1"), pytest.param("false", id="v0")])
def test_two_extensions_train_beside_a_proved_correction(
    trainer: str, run_program: Callable[..., Any], tmp_path: Path
) -> None:
    run = train(
        run_program,
        "correction=[tis_token,gsm]",
        "trainer.total_training_steps=2",
        f"trainer.use_v1={trainer}",
        f"offpolicy.record.dir={tmp_path / 'recording'}",
        "trainer.save_freq=2",
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
        *TWO,
    )
    assert run.returncode == 0, run.output[-3000:]
    assert [step["offpolicy/live/proved"] for step in run.steps[:1]] == [1.0]
    for number, step in enumerate(run.steps, start=1):
        for section in ("nudge", "sway"):
            assert step[f"{section}/live/rows"] == step["nudge/live/rows"] > 0
            assert step[f"{section}/updates"] == number
            assert step[f"{section}/prompts"] > 0
        # The raw scores are back: verl's own metric is a share of right answers.
        assert 0.0 <= step["critic/score/mean"] <= 1.0
    recording = Recording(tmp_path / "recording")
    assert {"offpolicy_nudge", "offpolicy_sway"} <= set(recording.rows().extensions)

    resumed = train(
        run_program,
        "correction=[tis_token,gsm]",
        "trainer.total_training_steps=3",
        f"trainer.use_v1={trainer}",
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
        "trainer.resume_mode=auto",
        *TWO,
    )
    assert resumed.returncode == 0, resumed.output[-3000:]
    (third,) = resumed.steps
    assert third["training/global_step"] == 3
    for section in ("nudge", "sway"):
        assert third[f"{section}/updates"] == 3
        assert third[f"{section}/prompts"] > run.steps[-1][f"{section}/prompts"]
