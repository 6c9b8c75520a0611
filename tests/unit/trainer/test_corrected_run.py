"""What each corrected trainer adds to verl's own, with verl's own checkpoint manager if there is one."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.fault_tolerance.checkpoints import RECORD, TRACKER, CheckpointError
from recipe.offpolicy.monitor.active_correction import ActiveCorrection
from recipe.offpolicy.preflight.composed import Composed
from recipe.offpolicy.proof.verify import LivenessError
from verl_patches.contract import bare_signature

WEIGHT = {"level": "token", "kind": "truncate", "lower": None, "upper": 2.0}


def config(folder: Path, upper: float = 2.0, **trainer: Any) -> DictConfig:
    return OmegaConf.create(
        {
            "trainer": {"default_local_dir": str(folder), "resume_mode": "auto", "max_actor_ckpt_to_keep": 1} | trainer,
            "correction": {"weight": WEIGHT | {"upper": upper}, "masks": {}},
            "offpolicy": {
                "resume_changed_correction": False,
                "watchdog": {"step_timeout": 7200, "phase_timeouts": {}, "poll": None},
            },
        }
    )


class Killed(BaseException):
    """The process ended here."""


class Trainer:
    """Do what verl's trainers do with checkpoints, including their checkpoint manager."""

    def __init__(self, config: DictConfig, ends_before_tracker: int = -1) -> None:
        from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

        self.config, self.global_steps, self.ends_before_tracker = config, 0, ends_before_tracker
        self.manager = object.__new__(BaseCheckpointManager)
        self.manager.previous_saved_paths = []

    def _save_checkpoint(self) -> None:
        keep = self.config.trainer.max_actor_ckpt_to_keep
        folder = Path(self.config.trainer.default_local_dir)
        self.manager.ensure_checkpoint_capacity(keep)
        actor = folder / f"global_step_{self.global_steps}" / "actor"
        actor.mkdir(parents=True, exist_ok=True)
        (actor / "model.pt").write_text(str(self.global_steps))
        self.manager.register_checkpoint(str(actor), keep)
        if self.global_steps == self.ends_before_tracker:
            raise Killed
        (folder / TRACKER).write_text(str(self.global_steps))

    def _load_checkpoint(self) -> int:
        from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

        path = find_latest_ckpt_path(self.config.trainer.default_local_dir)
        self.global_steps = int((Path(path) / "actor" / "model.pt").read_text()) if path else 0
        return self.global_steps

    def fit(self) -> None:
        self._load_checkpoint()
        while self.global_steps < 3:
            self.global_steps += 1
            self._save_checkpoint()


def correct(trainer: Any) -> Any:
    """Attach a corrected run to one of the trainers."""
    from recipe.offpolicy.trainer.corrected_run import CorrectedRun

    made: Any = CorrectedRun(trainer)
    made.supervision = SimpleNamespace(active_correction=ActiveCorrection(Composed(made.config).spec, made.config))
    return made


def run(supervised: bool, *args: Any, **kwargs: Any) -> Any:
    trainer = Trainer(*args, **kwargs)
    if supervised:
        correct(trainer)
    try:
        trainer.fit()
    except Killed:
        return None
    return trainer


def test_a_run_that_ends_in_the_same_place_goes_on_from_the_one_before(tmp_path: Path) -> None:
    assert run(True, config(tmp_path), ends_before_tracker=3) is None
    resumed = run(True, config(tmp_path))
    assert resumed.global_steps == 3
    assert (tmp_path / TRACKER).read_text() == "3"
    assert json.loads((tmp_path / "global_step_3" / RECORD).read_text())["step"] == 3


def test_another_correction_stops_before_anything_is_loaded(tmp_path: Path) -> None:
    run(True, config(tmp_path))
    with pytest.raises(CheckpointError, match=r"correction\.weight\.upper: 2\.0 in the checkpoint, 3\.0 now"):
        run(True, config(tmp_path, upper=3.0))


def recorded_run(ends: BaseException | None) -> Any:
    """A run whose recording fails when it is finished."""
    from recipe.offpolicy.trainer.corrected_run import CorrectedRun

    class Verls:
        config = OmegaConf.create()

        def fit(self) -> str:
            if ends is not None:
                raise ends
            return "what verl returns"

    def finish(patience: float) -> None:
        raise RuntimeError("no wait")

    trainer: Any = Verls()
    made: Any = CorrectedRun(trainer)
    made.recording = SimpleNamespace(finish=finish)
    return trainer


@pytest.mark.parametrize("ends", [None, LivenessError("not live")])
def test_the_wait_never_hides_how_the_run_ended(ends: BaseException | None, caplog: pytest.LogCaptureFixture) -> None:
    run = recorded_run(ends)
    if ends is None:
        assert run.fit() == "what verl returns"
    else:
        with pytest.raises(LivenessError, match="not live"):
            run.fit()
    assert "RuntimeError: no wait" in caplog.text


def test_the_seams_are_verls() -> None:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    for trainer in (RayPPOTrainer, PPOTrainer):
        for name in ("_save_checkpoint", "_load_checkpoint"):
            assert bare_signature(getattr(trainer, name)) == "(self)"
        # Where verl writes and names a checkpoint, and in which order.
        text = inspect.getsource(trainer._save_checkpoint)
        assert text.index("save_checkpoint(") < text.index("data.pt") < text.index(TRACKER)
