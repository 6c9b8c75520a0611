"""Rows with images on a real verl TrainingWorker: each row uses its own image, and the correction works as on text."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from recipe.offpolicy.batch import micro_batch as mb
from recipe.offpolicy.batch.seals import hash_model_input
from tests.support import images as im
from tests.support import training_worker as tw
from tests.support.first_update import first_update
from tests.support.specs import STACK
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

pytestmark = [pytest.mark.verl(">=0.9.1"), pytest.mark.usefixtures("recorder_clock")]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tw.join_process_group()
    return im.start_worker(im.tiny_model(tmp_path_factory.mktemp("images")))


def test_each_row_is_scored_with_its_own_image(worker: Any) -> None:
    """A row scores the same in a micro-batch as alone. verl does not notice another row's pixels of the same size,
    which change the result a lot.
    """
    rows = im.make_rollout()
    together = tw.trainer_log_probs(worker, rows)
    alone = tw.trainer_log_probs(worker, rows, micro_batch_size=1)
    for one, all_of_them in zip(alone, together, strict=True):
        assert torch.allclose(one, all_of_them, atol=1e-5)
    rows.media[3] = rows.media[5]
    swapped = tw.trainer_log_probs(worker, rows)
    moved = [float((a - b).abs().max()) > 0.1 for a, b in zip(together, swapped, strict=True)]
    assert moved == [row == 3 for row in range(8)]


@pytest.mark.parametrize("micro_batch_size", [2, pytest.param(1, marks=pytest.mark.extended)])
def test_the_correction_is_proved_where_some_rows_have_images(worker: Any, micro_batch_size: int) -> None:
    verdict = first_update(worker, STACK, rollout=im.make_rollout(), micro_batch_size=micro_batch_size)
    assert verdict["proved"] == 1.0
    assert verdict["rows"] == 8.0


def test_padded_rows_are_read_as_nested_ones(worker: Any) -> None:
    """V0's batch, converted by verl's own function, with four position ids per token."""
    rows = im.make_rollout()
    tw.add_log_probs(worker, rows, mismatch=0.2)
    nested = rows.to_tensordict()
    length = [len(each) for each in rows.prompts]
    before, behind = max(length), max(map(len, rows.responses))
    padded = nested.select("responses", "response_mask", "advantages", "old_log_probs", mb.ROLLOUT_LOG_PROBS)
    padded = padded.to_padded_tensor(0)
    prompts, attention = torch.zeros(8, before, dtype=torch.int64), torch.zeros(8, before + behind, dtype=torch.int64)
    positions = torch.zeros(8, im.AXES, before + behind, dtype=torch.int64)
    for row, (prompt, response, own) in enumerate(zip(rows.prompts, rows.responses, rows.positions(), strict=True)):
        there = slice(before - len(prompt), before + len(response))
        prompts[row, there.start : before], attention[row, there], positions[row, :, there] = prompt, 1, own
    padded["prompts"], padded["attention_mask"], padded["position_ids"] = prompts, attention, positions
    padded["input_ids"] = torch.cat([prompts, padded["responses"]], -1)
    padded["multi_modal_inputs"] = nested["multi_modal_inputs"]
    hashes = [hash_model_input(padded), hash_model_input(nested)]
    data = left_right_2_no_padding(padded)
    assert len({tuple(each.tolist()) for each in (*hashes, hash_model_input(data))}) == 1
    for found, own in zip(data["position_ids"].unbind(), rows.positions(), strict=True):
        assert torch.equal(found, own)
    tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, temperature=1.0, global_token_num=None)
    worker.engine_config.infer_micro_batch_size_per_gpu = 2
    log_probs = worker.infer_batch(data)["log_probs"]
    # The rows come as they went, images included.
    whole = no_padding_2_padding(log_probs, data)
    for row, old in enumerate(rows.old_log_probs):
        assert torch.allclose(whole[row, : len(old)], old, atol=1e-5)
    output = {"log_probs": log_probs, "entropy": None}
    of_padded, of_nested = mb.read(output, data), mb.read(output, nested)
    for name in ("responses", "response_mask", "rollout_log_prob", "old_log_prob", "log_prob", "advantages"):
        assert torch.equal(getattr(of_padded, name), getattr(of_nested, name)), name


@pytest.mark.slow
def test_rows_go_through_transfer_queue_with_their_own_images(run_program: Any) -> None:
    finished = run_program([sys.executable, "-m", "tests.support.images_in_queue"], limit=240)
    assert finished.returncode == 0, finished.output[-3000:]
    assert "rows: each with its own" in finished.output
    assert "refused: sequence 0 has image_grid_thw, pixel_values" in finished.output
    assert "scored: [[-5.0, -6.0], [-8.0, -9.0, -10.0]]" in finished.output
