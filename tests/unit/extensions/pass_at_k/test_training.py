"""Advantages, group sizes and draws of prompts that train pass@k."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from recipe.offpolicy.extensions.pass_at_k.training import (
    NUMBER,
    OBJECTIVES,
    BlockSampler,
    PassRates,
    advantages,
    allocate,
    find_impossible,
    replace_sampler,
)


def group(n: int, c: int) -> Tensor:
    return torch.arange(n) < c


def test_a_deal_depends_on_its_seed_alone_and_gives_each_row_its_groups_best() -> None:
    found = advantages(group(8, 1), 4, objective="groups", seed=5)
    assert torch.equal(found, advantages(group(8, 1), 4, objective="groups", seed=5))
    assert sorted(found.tolist()) == 4 * [-0.5] + 4 * [0.5]
    assert float(found[0]) == 0.5
    assert len({tuple(advantages(group(8, 1), 4, objective="groups", seed=s).tolist()) for s in range(20)}) > 5


@pytest.mark.parametrize(
    ("n", "k", "objective"),
    [*((8, k, objective) for objective in OBJECTIVES for k in (0, 9)), (8, 8, "loo"), (8, 3, "groups")],
)
def test_an_impossible_k_is_named_with_the_group(n: int, k: int, objective: str) -> None:
    assert find_impossible(n, k, objective) is not None
    with pytest.raises(ValueError, match=rf"k={k} with a group of {n}"):
        advantages(group(n, 1), k, objective=objective)


# Group sizes against brute force, and the rates that they go by


def worth(rates: list[float], sizes: tuple[int, ...] | list[int], k: int) -> float:
    return sum(k * (1 - p) ** (k - 1) * (1 - p**n - (1 - p) ** n) for p, n in zip(rates, sizes, strict=True))


@given(st.lists(st.floats(0.001, 0.999), min_size=6, max_size=6), st.integers(6, 24), st.sampled_from([1, 2, 4, 16]))
@settings(max_examples=15)
def test_optimal_against_all_deals(rates: list[float], total: int, k: int) -> None:
    found = allocate(rates, total, least=1, most=4, k=k)
    assert sum(found) == total
    assert all(1 <= size <= 4 for size in found)
    best = max(worth(rates, sizes, k) for sizes in product(range(1, 5), repeat=6) if sum(sizes) == total)
    assert worth(rates, found, k) == pytest.approx(best, abs=1e-12)


def test_hard_prompts_get_more() -> None:
    """A third rollout adds 4 x 0.05^3 x 0.0475 to pass@4 at a rate of 0.95, and 4 x 0.95^3 x 0.0475 at a rate
    of 0.05.
    """
    assert allocate([0.95, 0.05], 16, least=2, most=14) == [2, 14]
    assert allocate([0.95, 0.05], 16, least=2, most=14, k=1) == [8, 8]
    # 0 of 16 under Beta(1, 3): 1 / 20. Rates that a power of 1 - p underflows for, and both ends.
    rates = PassRates(1.0, {"unsolved": (16.0, 0.0), "solved": (16.0, 16.0)}, (1.0, 3.0))
    assert allocate([rates.estimate(name) for name in rates.counts], 16, least=2, most=14, k=1024) == [14, 2]
    assert allocate([1 - 1e-12, 1e-12, 1.0, 0.0], 16, least=1, most=10, k=512) == [4, 10, 1, 1]


def test_a_rate_is_the_prompts_own_over_all_prompts_as_a_prior() -> None:
    """Without a fit, Beta(1, 1): (1 + 2) / (2 + 8). After a decay by half: 4 + 8 answers, 1 + 6 correct."""
    rates = PassRates(0.5)
    assert rates.estimate("new") == 0.5
    rates.add({"a": (8, 2)})
    assert rates.estimate("a") == pytest.approx(3 / 10)
    rates.add({"a": (8, 6)})
    assert rates.counts["a"] == (12.0, 7.0)
    assert rates.estimate("a") == pytest.approx(8 / 14)


def test_many_prompts_make_a_prior() -> None:
    rates = PassRates(0.9)
    rates.add({str(number): (8, 0 if number % 3 else 3) for number in range(60)})
    a, b = rates.prior
    assert a / (a + b) == pytest.approx(1 / 8, rel=0.3)
    assert rates.estimate("new") < 0.2
    again = PassRates(0.9)
    again.restore(json.loads(json.dumps(rates.to_json())))
    assert again == rates


# Draws of prompts: their chances, blocks without repetition, a checkpoint's state, and numbers in each batch


def by_hand(rows: int = 4) -> torch.Tensor:
    return torch.tensor([0.4, 0.3, 0.2, 0.1][:rows], dtype=torch.float64)


def collate(rows: list[Any]) -> dict[str, Any]:
    return {"text": rows}


def make_loader(seed: int = 0, rows: int = 12, batch: int = 4) -> Any:
    data = [f"row {row}" for row in range(rows)]
    verls = StatefulDataLoader(dataset=data, batch_size=batch, drop_last=True, collate_fn=collate, sampler=None)
    chances = torch.arange(1, rows + 1).double() / sum(range(1, rows + 1))
    return replace_sampler(verls, BlockSampler(rows, batch, lambda: chances, seed))


def numbers(loader: Any) -> list[list[int]]:
    return [batch[NUMBER].tolist() for batch in loader]


def test_a_block_holds_no_row_twice_and_goes_by_the_chances() -> None:
    """The first of two is row i with probability p_i; the second is j with probability p_j / (1 - p_i) among the
    others.
    """
    sampler = BlockSampler(4, 2, by_hand, seed=0)
    drawn = [sampler.draw() for _ in range(4000)]
    assert all(len(set(block)) == 2 for block in drawn)
    first = Counter(block[0] for block in drawn)
    after_0 = Counter(block[1] for block in drawn if block[0] == 0)
    for row, chance in enumerate(by_hand().tolist()):
        assert first[row] / 4000 == pytest.approx(chance, abs=0.03)
        if row:
            assert after_0[row] / first[0] == pytest.approx(chance / 0.6, abs=0.045)


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
    """verl's asynchronous modes fetch prompts one at a time, but blocks contain the whole batch."""

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
