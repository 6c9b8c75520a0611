"""Rows that an extension creates, in the layout that verl's workers read."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.trainer.batch_view import MediaError, build_padded, demand_text, pad_rows

ROWS = [([5], [6, 7]), ([8, 9], [1])]


@pytest.mark.parametrize(
    ("rows", "batch", "ranks", "changes", "expected"),
    [
        (32, 128, 1, {}, 64),
        (33, 128, 4, {"rollout.log_prob_use_dynamic_bsz": True}, 36),
        (32, 128, 1, {"actor.strategy": "megatron"}, 128),
    ],
)
def test_a_pass_has_the_fewest_rows_that_workers_can_split(
    rows: int, batch: int, ranks: int, changes: dict[str, Any], expected: int
) -> None:
    rollout = {"log_prob_use_dynamic_bsz": False, "log_prob_micro_batch_size_per_gpu": 64}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "actor": {"strategy": "fsdp2"}}})
    for key, value in changes.items():
        OmegaConf.update(config, f"actor_rollout_ref.{key}", value)
    given = [([row], [row]) for row in range(rows)]
    assert pad_rows(given, batch, ranks, config) == (given * 4)[:expected]


def test_padded_columns_by_hand() -> None:
    found = {name: column.tolist() for name, column in build_padded(ROWS).items()}
    assert found == {
        "prompts": [[0, 5], [8, 9]],
        "responses": [[6, 7], [1, 0]],
        "input_ids": [[0, 5, 6, 7], [8, 9, 1, 0]],
        "attention_mask": [[0, 1, 1, 1], [1, 1, 1, 0]],
        "position_ids": [[0, 0, 1, 2], [0, 1, 2, 2]],
        "response_mask": [[1, 1], [1, 0]],
    }


def test_rows_with_images_are_not_scored_by_their_tokens_alone() -> None:
    """The pixels of the first row are not used either; another row's pixels of the same size would go unnoticed."""
    demand_text([{}, None, {}])
    with pytest.raises(MediaError, match=r"sequence 1 has image_grid_thw, pixel_values, .*snapshots=null"):
        demand_text([{}, {"pixel_values": 0, "image_grid_thw": 0}])
