"""What is looked at of each rollout, nested as V1 has it and padded as V0."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from recipe.offpolicy.batch.micro_batch import sampled_checksums
from recipe.offpolicy.proof.rollout_checks import SampleWatch, naming_missing
from recipe.offpolicy.proof.rollout_log_probs import ArrivalError
from recipe.offpolicy.proof.token_alignment import AlignmentError, tally

ROWS, WIDTH = 64, 12


def rollout(*, nested: bool, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(WIDTH) < torch.randint(6, WIDTH + 1, (ROWS, 1), generator=generator)
    old = -2.0 * torch.rand(ROWS, WIDTH, generator=generator)
    columns = {
        "responses": torch.randint(0, 99, (ROWS, WIDTH), generator=generator),
        "response_mask": mask.long(),
        "rollout_log_probs": old + 0.01 * torch.randn(ROWS, WIDTH, generator=generator).clamp(max=0.0),
        "old_log_probs": old,
    }
    if nested:
        columns = {
            name: torch.nested.as_nested_tensor(
                [row[valid] for row, valid in zip(column, mask, strict=True)], layout=torch.jagged
            )
            for name, column in columns.items()
        }
    return TensorDict(columns, batch_size=ROWS)


@pytest.mark.parametrize("nested", [True, False])
def test_a_healthy_rollout(nested: bool) -> None:
    watch, rows = SampleWatch(), rollout(nested=nested)
    assert watch.sampled(rows) == sampled_checksums(rows)
    watch.aligned(rows, groups=[str(row // 8) for row in range(ROWS)])
    assert watch.metrics()["alignment/concordance_rows"] > 0.95
    assert watch.metrics().keys() == {f"alignment/concordance_{kind}" for kind in ("rows", "siblings", "tokens")}


def test_both_layouts_have_the_same_checksums() -> None:
    assert SampleWatch().sampled(rollout(nested=True)) == SampleWatch().sampled(rollout(nested=False))


def test_missing() -> None:
    rows = rollout(nested=True).exclude("rollout_log_probs")
    with pytest.raises(ArrivalError, match="came without them, it has old_log_probs, response_mask, responses"):
        SampleWatch().sampled(rows)


@pytest.mark.parametrize("nested", [True, False])
def test_zeros(nested: bool) -> None:
    rows = rollout(nested=nested)
    rows["rollout_log_probs"] = rows["rollout_log_probs"] * 0
    watch = SampleWatch()
    watch.sampled(rows)
    with pytest.raises(ArrivalError, match="64 of 64 rows hold nothing but zeros"):
        watch.aligned(rows)


def test_rows_permuted_at_the_source() -> None:
    rows = rollout(nested=False)
    rows["rollout_log_probs"] = rows["rollout_log_probs"].flip(0)
    watch = SampleWatch()
    watch.sampled(rows)  # nothing is wrong with them as far as they go
    with pytest.raises(AlignmentError, match="those of other rows"):
        watch.aligned(rows)


def test_what_workers_counted() -> None:
    rows = rollout(nested=False)
    mu, old, mask = (rows[name] for name in ("rollout_log_probs", "old_log_probs", "response_mask"))
    halves = [tally(old[part], mu[part], mask[part]) for part in (slice(0, 32), slice(32, 64))]
    watch = SampleWatch()
    watch.judge([*halves, None])
    assert watch.metrics()["alignment/concordance_rows"] > 0.95
    shifted = [tally(old[part], mu[part].roll(1, -1), mask[part]) for part in (slice(0, 32), slice(32, 64))]
    with pytest.raises(AlignmentError, match="off by one token"):
        SampleWatch().judge(shifted)


def test_a_store_in_which_some_rows_lack_them() -> None:
    with pytest.raises(ArrivalError, match="stopped arriving"), naming_missing():
        raise ValueError("Some fields are not ready in all the requested keys!")
    with pytest.raises(ValueError, match="were not found"), naming_missing():
        raise ValueError("keys or partition were not found!")


def test_the_store_still_says_so() -> None:
    import inspect

    from transfer_queue import interface

    assert "fields are not ready" in inspect.getsource(interface.async_kv_batch_get)
