"""Whole runs whose rollout engine does not receive the trainer's weights; each run stops at the synchronisation that
fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe.offpolicy.delivery.probe import IN_A_ROW, KEPT_IN_A_ROW
from tests.support.whole_runs import broken, trained

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.verl("==0.9.1")]

TENSORS = 26
EACH = "offpolicy.delivery.probe=1"
BEFORE = "It holds the weights from 1 synchronisation earlier."
FAULTS = {
    "nothing_sent": (f"{TENSORS} of {TENSORS} tensors differ", BEFORE),
    "late_weights": (f"{TENSORS} of {TENSORS} tensors differ", BEFORE),
    "late_parameters": (f"of {TENSORS} tensors differ", BEFORE),
    "layer_left_out": (f"12 of {TENSORS} tensors differ: model.layers.1.", BEFORE),
    "other_weights": (f"{TENSORS} of {TENSORS} tensors differ", "none of the last synchronisations"),
}


def test_a_healthy_run(run_program: Callable[..., Any], tmp_path: Path) -> None:
    record = tmp_path / "recording"
    steps = trained(run_program, EACH, "trainer.total_training_steps=4", f"offpolicy.record.dir={record}")
    assert [step["offpolicy/delivery/proved"] for step in steps] == [1.0] * 4
    assert {step["offpolicy/delivery/equal"] for step in steps} == {TENSORS}
    assert steps[-1]["offpolicy/delivery/probe_slope"] == pytest.approx(1.0, abs=0.3)
    lines = [json.loads(line) for line in (record / "delivery.jsonl").read_text().splitlines()]
    assert [line["verdict"] for line in lines] == ["equal"] * 5


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_are_not_delivered_stop_the_synchronisation(run_program: Callable[..., Any], fault: str) -> None:
    run = broken(run_program, f"{fault}:2", "trainer.total_training_steps=3")
    assert "LivenessError: synchronisation 2: the rollout engine does not hold the trainer's weights" in run.log
    for words in FAULTS[fault]:
        assert words in run.log


def test_the_probe_alone_finds_that_nothing_is_delivered(run_program: Callable[..., Any]) -> None:
    run = broken(run_program, "nothing_sent:3", EACH, "offpolicy.delivery.sums=null", "trainer.total_training_steps=12")
    assert "do not follow the trainer's weights" in run.log
    assert len(run.steps) >= IN_A_ROW


def test_a_prefix_cache_that_is_kept(run_program: Callable[..., Any]) -> None:
    run = broken(
        run_program,
        "kept_cache:2",
        EACH,
        "trainer.total_training_steps=6",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
    )
    assert f"kept its prefix cache after receiving new weights, in {KEPT_IN_A_ROW} probes in a row" in run.log
