"""Rows that cannot be split evenly: by hand, and with values that divide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import DictConfig

from recipe.offpolicy.preflight.checks.batch_sizes import check_micro_batches, count_data_parallel_ranks
from tests.support.applications import NEEDED, application, changed
from tests.support.corrections import TIS, spec

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
SCORED = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
pytestmark = pytest.mark.verl(">=0.9")


@pytest.fixture(scope="module")
def base() -> Iterator[DictConfig]:
    """256 x 5 rows a mini-batch and 1024 x 5 a batch on 8 ranks: 160 and 640 on each."""
    with application("correction=tis_token", f"{ROLLOUT}.n=5", *NEEDED) as config:
        yield config


def found(base: DictConfig, changes: dict[str, Any], **correction: Any) -> dict[str, tuple[str, ...]]:
    config = changed(base, changes)
    return {p.key: p.overrides for p in check_micro_batches(config, correction.get("spec", spec(TIS)))}


def test_what_divides_passes(base: DictConfig) -> None:
    for size in (1, 2, 16, 32, 160):
        assert found(base, {MICRO: size}) == {}
    assert found(base, {MICRO: 8, SCORED: 640}) == {}


@pytest.mark.parametrize(("size", "fits"), [(3, 2), (64, 40), (200, 160), (161, 160)])
def test_the_largest_divisor_is_proposed(base: DictConfig, size: int, fits: int) -> None:
    """160 = 2^5 x 5: its divisors are 1 2 4 5 8 10 16 20 32 40 80 160."""
    assert found(base, {MICRO: size}) == {MICRO: (f"{MICRO}={fits}",)}
    assert found(base, {MICRO: fits}) == {}


def test_dynamic_micro_batches_have_no_size(base: DictConfig) -> None:
    dynamic = {f"{ACTOR}.use_dynamic_bsz": True, f"{ROLLOUT}.log_prob_use_dynamic_bsz": True}
    assert found(base, {MICRO: 7, SCORED: 7} | dynamic) == {}


def test_forward_passes_see_the_whole_batch(base: DictConfig) -> None:
    assert found(base, {SCORED: 128}) == {}  # 640 = 5 x 128
    assert found(base, {SCORED: 96}) == {SCORED: (f"{SCORED}=80",)}
    without = spec().from_mapping({"proximal": "bypass"})
    assert found(base, {SCORED: 96}, spec=without) == {}
    reference = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    assert found(base, {reference: 96}) == {}
    assert found(base, {reference: 96, f"{ACTOR}.use_kl_loss": True}) == {reference: (f"{reference}=80",)}


def test_separate_async_makes_a_step_of_each_mini_batch(base: DictConfig) -> None:
    changes = {"trainer.v1.trainer_mode": "separate_async", SCORED: 128}
    assert found(base, changes) == {SCORED: (f"{SCORED}=80",)}  # 160 rows a rank


def test_ranks_that_do_not_divide_a_mini_batch(base: DictConfig) -> None:
    # 100 x 5 = 500 rows on 8 ranks; 96 x 5 = 480 = 8 x 60.
    assert found(base, {f"{ACTOR}.ppo_mini_batch_size": 100}) == {
        f"{ACTOR}.ppo_mini_batch_size": (f"{ACTOR}.ppo_mini_batch_size=96",)
    }
    assert found(base, {f"{ACTOR}.ppo_mini_batch_size": 96}) == {}


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, 8),
        ({"trainer.nnodes": 2}, 16),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, 4),
        ({f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 4}, 2),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 3}, None),
        (
            {
                f"{ACTOR}.strategy": "megatron",
                f"{ACTOR}.megatron": {
                    "tensor_model_parallel_size": 2,
                    "pipeline_model_parallel_size": 2,
                    "context_parallel_size": 1,
                },
            },
            2,
        ),
    ],
)
def test_data_parallel_ranks(base: DictConfig, changes: dict[str, Any], ranks: int | None) -> None:
    assert count_data_parallel_ranks(changed(base, changes)) == ranks
