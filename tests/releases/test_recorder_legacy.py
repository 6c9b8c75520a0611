"""The recorder with verl 0.7.1's legacy FSDP actor: the files contain what the loss read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe.offpolicy.batch import micro_batch as mb
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording import Recording, Step
from recipe.offpolicy.recording.recorder import flush_all
from tests.support import legacy_actor as la
from tests.support.specs import STACK

pytestmark = [pytest.mark.verl("==0.7.1"), pytest.mark.usefixtures("legacy_patches", "recorder_clock")]

ROWS, STEP = len(la.LENGTHS), 1


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[mb.MicroBatch]:
    """Every micro-batch that a loss reads, including those of the proof's trials."""
    read: list[mb.MicroBatch] = []
    original = mb.read

    def watched(*args: Any) -> mb.MicroBatch:
        read.append(original(*args))
        return read[-1]

    monkeypatch.setattr(mb, "read", watched)
    return read


def recorded(directory: Path, mapping: dict[str, Any], *, prove: bool = False, epochs: int = 1) -> Step:
    """Two mini-batches of two micro-batches each."""
    actor = la.actor(ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=2, ppo_epochs=epochs)
    la.moved(actor, la.handed(la.rollout(), mapping, prove=prove, mini_rows=4, record=str(directory)))
    flush_all()
    return Recording(directory).step(STEP)


def assert_recorded(step: Step, micro_batches: list[mb.MicroBatch], mapping: dict[str, Any]) -> None:
    """Compare each column with the loss's inputs and decisions, in the order of the calls."""
    rows, i = step.rows, 0
    batch, spec = la.rollout(), CorrectionSpec.from_mapping(mapping)
    assert step.spec == spec.to_mapping()
    for micro in micro_batches:
        decided = mb.decide(spec, micro)
        for j in range(len(micro.responses)):
            mask = micro.response_mask[j]
            width = int(mask.nonzero().max()) + 1
            tokens = slice(rows.offsets[i], rows.offsets[i + 1])
            for name, tensor in {
                "response_ids": micro.responses,
                "response_mask": micro.response_mask,
                "rollout_log_prob": micro.rollout_log_prob,
                "old_log_prob": micro.old_log_prob,
                "log_prob": micro.log_prob.detach(),
                "advantages": micro.advantages,
            }.items():
                expected = tensor[j, :width].numpy()
                found = getattr(rows, name)[tokens]
                np.testing.assert_array_equal(found, expected.astype(found.dtype), err_msg=name)
            weight, keep = decided.weight[j, :width].numpy(), decided.keep[j, :width].numpy()
            np.testing.assert_array_equal(rows.weight[tokens], weight.astype(np.float32))
            counted = mask[:width].bool().numpy()
            np.testing.assert_array_equal((rows.rejected_by[tokens] == 0)[counted], keep[counted])
            # The batch came in this order.
            assert rows.uid[i] == f"row{i}"
            assert rows.reward[i] == i / 2
            attended = batch["attention_mask"][i, : la.PROMPT].bool()
            prompt = batch["input_ids"][i, : la.PROMPT][attended]
            found = rows.prompt_ids[rows.prompt_offsets[i] : rows.prompt_offsets[i + 1]]
            np.testing.assert_array_equal(found, prompt.numpy())
            i += 1
    assert i == len(rows) == ROWS
    assert rows.mini_batch.tolist() == [0] * 4 + [1] * 4


def test_two_gradient_steps_are_recorded_as_the_loss_saw_them(tmp_path: Path, seen: list[mb.MicroBatch]) -> None:
    step = recorded(tmp_path, STACK)
    assert_recorded(step, seen, STACK)
    rows = step.rows
    assert (rows.rejected_by != 0).any()
    assert rows.weight.max() > 1.0
    # The second mini-batch was seen by a policy that the first had moved.
    model = la.model()
    with torch.no_grad():
        first = la.forward(model, la.rollout())[0]
    at = rows.mini_batch[rows.row_of_token]
    moved = np.abs(rows.log_prob - np.concatenate([first[n, :k].numpy() for n, k in enumerate(np.diff(rows.offsets))]))
    assert moved[at == 0].max() < 1e-6 < moved[at == 1].max()
