"""The trainer's half: the card, the proof, and what it tells the workers about each update."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.batch.plan import BatchSplit, SharedPlan, UpdateRows
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording import Recording
from recipe.offpolicy.recording.recording import file_name
from recipe.offpolicy.recording.run import POLL, RecordSettings, RunRecord
from recipe.offpolicy.recording.writer import Item, StepWriter
from tests.support.recordings import drawn_rows, record

SPEC = CorrectionSpec.from_mapping({"masks": {"opsm": {
    "ratio": "full", "level": "sequence", "aggregate": "geometric", "delta": 0.1, "when": "negative"}}})  # fmt: skip


def config(tmp_path: Path, directory: str | None = "rec", epochs: int = 1) -> DictConfig:
    return OmegaConf.create(
        {
            "offpolicy": {"record": {"dir": directory and str(tmp_path / directory)}},
            "actor_rollout_ref": {
                "model": {"path": "/models/small"},
                "actor": {"ppo_epochs": epochs, "strategy": "fsdp2"},
                "rollout": {
                    "name": "vllm",
                    "temperature": 0.7,
                    "top_p": 0.9,
                    "top_k": -1,
                    "engine_kwargs": {"vllm": {"min_p": 0.05}},
                },
            },
            "trainer": {"default_local_dir": str(tmp_path / "ckpt"), "resume_mode": "auto", "use_v1": True,
                        "total": "${trainer.default_local_dir}/x"},
        }
    )  # fmt: skip


def run(tmp_path: Path, **kwargs: Any) -> RunRecord:
    return RunRecord(config(tmp_path, **kwargs), SPEC, {"other": CorrectionSpec()})


def announce(of: RunRecord, step: int, rows: int = 24, updates: int = 1) -> UpdateRows | None:
    plan = of.announce_update(
        SharedPlan(step), rows=rows, batch_split=lambda: BatchSplit(2, 8, "token-mean"), updates=updates
    )
    assert plan.step == step
    return plan.update


def test_the_card_says_what_was_run(tmp_path: Path) -> None:
    run(tmp_path)
    record(tmp_path / "rec", drawn_rows([1]))
    card = dict(Recording(tmp_path / "rec").card)
    assert card["correction"] == SPEC.to_mapping()
    assert card["fingerprint"] == SPEC.fingerprint()
    assert card["shadows"] == {"other": CorrectionSpec().to_mapping()}
    assert card["path"] == f"verl {card['release']}, V1 trainer, engine worker on fsdp2, mode sync"
    assert (card["model"], card["schema"]) == ("/models/small", 3)
    assert card["sampling"] == {"engine": "vllm", "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.05}
    assert card["checkpoints"] == str(tmp_path / "ckpt")
    assert card["config"]["trainer"]["total"] == f"{tmp_path / 'ckpt'}/x"
    assert time.strptime(card["started"], "%Y-%m-%dT%H:%M:%S+00:00")


def test_what_is_recorded_is_its_owners_alone(tmp_path: Path) -> None:
    """Whether a trainer or a worker creates the directory, and whatever the umask; an existing directory keeps its
    mode.
    """
    before = os.umask(0)
    try:
        run(tmp_path).write_proof(1, "LIVE", {})
        for directory in ("rec", "worker"):
            writer = StepWriter(RecordSettings.at(str(tmp_path / directory)), rank=0, ranks=1)
            writer.add(Item(1, None, 0, None, {}, (), last=False))
            writer._rows.append(drawn_rows([2]))
            writer.close()
        (tmp_path / "shared").mkdir(0o755)
        run(tmp_path, directory="shared")
    finally:
        os.umask(before)
    step = file_name(1, 0)
    modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {
        **dict.fromkeys(("rec", "worker"), 0o700),
        **dict.fromkeys(("rec/run.json", "rec/proof.json", f"rec/{step}", f"worker/{step}", "shared/run.json"), 0o600),
        "shared": 0o755,
    }


def test_updates_of_a_step_are_counted_with_their_gradient_steps(tmp_path: Path) -> None:
    """3 mini-batches in 2 epochs are 6 gradient steps per update, also if the last mini-batch is smaller."""
    of = run(tmp_path, epochs=2)
    assert announce(of, step=1, updates=2) == UpdateRows(2, 12, 4, update=0, updates=2, gradient_steps=0)
    assert announce(of, step=1, updates=2) == UpdateRows(2, 12, 4, update=1, updates=2, gradient_steps=6)
    assert announce(of, step=2, rows=20, updates=2) == UpdateRows(2, 10, 4, update=0, updates=2)
    assert announce(of, step=2, updates=2) == UpdateRows(2, 12, 4, update=1, updates=2, gradient_steps=6)


def test_a_resumed_run_forgets_what_is_made_again(tmp_path: Path) -> None:
    """Two ranks recorded steps 1 to 5, and the checkpoint is of step 3, so one rank repeats steps 4 and 5."""
    run(tmp_path)
    record(tmp_path / "rec", *(drawn_rows([1], step=step, rank=rank) for step in range(1, 6) for rank in range(2)))
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = run(tmp_path)
    assert Recording(tmp_path / "rec").steps == [1, 2, 3, 4, 5]
    announce(resumed, step=4)
    announce(resumed, step=5)
    assert Recording(tmp_path / "rec").steps == [1, 2, 3]


def pauses(of: RunRecord, then: Callable[[int], None] = lambda number: None) -> int:
    """Number of waits at the end, four at most; ``then`` is what happens in each pause, by its number."""
    made: list[float] = []

    def pause(seconds: float) -> None:
        made.append(seconds)
        then(len(made))

    of.finish(patience=4 * POLL, pause=pause)
    assert set(made) <= {POLL}
    return len(made)


def test_the_end_waits_for_the_last_step_of_every_rank(tmp_path: Path) -> None:
    """One rank writes in the first pause, the other in the third."""
    of = run(tmp_path)
    announce(of, step=1)
    assert pauses(of) == 4

    def write(number: int) -> None:
        if number in (1, 3):
            record(tmp_path / "rec", drawn_rows([1], rank=number // 2))

    assert pauses(of, write) == 3
    assert pauses(of) == 0


def test_what_cannot_be_removed_ends_the_recording_and_not_the_run(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    """A directory has a file's name, so unlink raises for every user."""
    of = run(tmp_path)
    (tmp_path / "rec" / "step_00000004.rank_00000.parquet").mkdir()
    assert announce(of, step=4) is None
    assert announce(of, step=5) is None
    assert pauses(of) == 0
    (entry,) = warnings.records
    assert entry.getMessage().startswith(
        f"offpolicy.record.dir={tmp_path / 'rec'}: the recording of step 4 and later cannot be removed ("
    )
    assert entry.getMessage().endswith(
        "). Fix: move the recording elsewhere, or set another directory. Nothing is recorded, and training continues."
    )
