"""Draws of prompts: their chances, blocks without repetition, a checkpoint's state, and numbers in each batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from recipe.offpolicy.extensions.pass_at_k.training import (
    NUMBER,
    BlockSampler,
    PassRates,
    compute_chances,
    replace_sampler,
)


def by_hand(rows: int = 4) -> torch.Tensor:
    return torch.tensor([0.4, 0.3, 0.2, 0.1][:rows], dtype=torch.float64)


def collate(rows: list[Any]) -> dict[str, Any]:
    return {"text": rows}


def make_loader(seed: int = 0, rows: int = 12, batch: int = 4) -> Any:
    verls = StatefulDataLoader(
        dataset=[f"row {row}" for row in range(rows)],
        batch_size=batch,
        drop_last=True,
        collate_fn=collate,
        sampler=None,
    )
    chances = torch.arange(1, rows + 1).double() / sum(range(1, rows + 1))
    return replace_sampler(verls, BlockSampler(rows, batch, lambda: chances, seed))


def numbers(loader: Any) -> list[list[int]]:
    return [batch[NUMBER].tolist() for batch in loader]


def test_chances_by_hand() -> None:
    """Beta(1, 1): p = 1/2 where nothing is known, 7/8 after 6 of 6. n = 2: 2 p (1 - p) is 1/2 and 7/32.

    k = 3 weighs these by (1 - p)^2, 1/4 and 1/64.
    """
    for k, weight in ((1, 1), (3, 1 / 16)):
        found = compute_chances(PassRates(1.0, {"2": (6.0, 6.0)}), 3, 2, 0.2, k=k)
        worth = (1 / 2, 1 / 2, weight * 7 / 32)
        assert found.tolist() == pytest.approx([0.2 / 3 + 0.8 * each / sum(worth) for each in worth])
        assert float(found.sum()) == pytest.approx(1)


def test_chances_of_a_solved_data_set_stay_finite() -> None:
    """(1 - p)^1023 of p = 1 - 1e-9 underflows; prompts that are alike are drawn alike."""
    rates = PassRates(1.0, {str(prompt): (1e9, 1e9) for prompt in range(4)})
    assert compute_chances(rates, 4, 8, 0.2, k=1024).tolist() == pytest.approx([0.25] * 4)


def test_every_prompt_keeps_its_uniform_share() -> None:
    rates = PassRates(1.0, {str(prompt): (1e9, 1e9) for prompt in range(9)})
    found = compute_chances(rates, 10, 8, 0.2)
    assert found[:9].tolist() == pytest.approx([0.02] * 9, rel=1e-6)
    assert float(found[9]) == pytest.approx(0.82)


def test_a_block_holds_no_row_twice_and_goes_by_the_chances() -> None:
    """The first of two is row i with p_i; the second is j with p_j / (1 - p_i) among the others."""
    sampler = BlockSampler(4, 2, by_hand, seed=0)
    drawn = [sampler.draw() for _ in range(4000)]
    assert all(len(set(block)) == 2 for block in drawn)
    first = Counter(block[0] for block in drawn)
    after_0 = Counter(block[1] for block in drawn if block[0] == 0)
    for row, chance in enumerate(by_hand().tolist()):
        assert first[row] / 4000 == pytest.approx(chance, abs=0.03)
        if row:
            assert after_0[row] / first[0] == pytest.approx(chance / 0.6, abs=0.045)


def test_numbers_are_those_of_the_rows() -> None:
    for batch in make_loader():
        assert batch["text"] == [f"row {number}" for number in batch[NUMBER]]


def test_rows_of_a_last_batch_that_is_dropped_are_forgotten() -> None:
    loader = make_loader(rows=10)
    for _ in range(3):
        assert [batch["text"] for batch in loader] != []
    for batch in loader:
        assert batch["text"] == [f"row {number}" for number in batch[NUMBER]]


@pytest.mark.parametrize("taken", [0, 2])
def test_a_resumed_run_draws_what_the_other_would_have(taken: int) -> None:
    first = make_loader()
    batches = iter(first)
    for _ in range(taken):
        next(batches)
    state = first.state_dict()
    rest = [batch[NUMBER].tolist() for batch in batches] + numbers(first)
    again = make_loader(seed=5)
    again.load_state_dict(state)
    assert numbers(again) + numbers(again) == rest


def test_a_block_that_is_taken_one_by_one_goes_on_where_it_was() -> None:
    """verl's asynchronous modes fetch prompts one at a time; blocks are of the whole batch."""

    def ones(seed: int) -> Any:
        verls = StatefulDataLoader(dataset=list(range(8)), batch_size=1, drop_last=True, collate_fn=collate)
        return replace_sampler(verls, BlockSampler(8, 4, lambda: torch.full((8,), 0.125), seed))

    first = ones(0)
    batches = iter(first)
    head = [next(batches)[NUMBER].tolist() for _ in range(3)]
    state = first.state_dict()
    rest = [batch[NUMBER].tolist() for batch in batches]
    drawn = [number for batch in head + rest for number in batch]
    assert len(set(drawn[:4])) == len(set(drawn[4:])) == 4
    again = ones(9)
    again.load_state_dict(state)
    assert numbers(again) == rest


def test_other_data_are_refused_by_both_numbers() -> None:
    first, other = make_loader(), make_loader(rows=16)
    next(iter(first))
    other.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"drew from 12 prompts, but data\.train_files has 16"):
        next(iter(other))
