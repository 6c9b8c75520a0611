"""What is read of an engine's answer, and what a row's scores hold; ways to be unusable are in test_prefix_scorer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.offpolicy.extensions.process_reward.prefix_scorer import (
    PROMPT,
    ScoredPrompt,
    Tail,
    build_sampling,
    read_answer,
    score_tails,
)


def test_an_answer_is_read_from_the_end_of_the_list() -> None:
    prompt, found = [5, 6, 7, 1, 2], ScoredPrompt([9, 1, 2], [1e38, -1.0, -2.0], None)
    assert read_answer(found, prompt, [1, 2], read_cache=False) == [-1.0, -2.0]
    assert read_answer(found._replace(cached=2), prompt, [1, 2], read_cache=True) == [-1.0, -2.0]
    assert read_answer(found._replace(cached=3), prompt, [1, 2], read_cache=True) is None
    assert read_answer(found, prompt, [1, 2], read_cache=True) is None


def test_requests_sample_one_token_at_temperature_1() -> None:
    kept, skipped = build_sampling(read_cache=True), build_sampling(read_cache=False)
    assert kept | {"skip_reading_prefix_cache": True} == skipped
    assert (kept["temperature"], kept["prompt_logprobs"], kept["flat_logprobs"]) == (1.0, 0, True)


def test_tails_are_scored_in_their_order_each_by_a_request_of_its_own() -> None:
    asked: list[tuple[str, list[int]]] = []

    async def generate(prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Any:
        asked.append((request_id, prompt_ids))
        await asyncio.sleep(0.01 / len(prompt_ids))  # the longest comes first
        log_probs = [-each / 10 for each in prompt_ids[1:]]
        fields = {"global_steps": 4, PROMPT: ScoredPrompt(prompt_ids[1:], log_probs, 0)}
        return SimpleNamespace(stop_reason="completed", extra_fields=fields)

    tails = [Tail(1, (9, 3), 1, may_read=False), Tail(3, (9, 3, 5), 2, may_read=True)]
    found = asyncio.run(score_tails(generate, [7, 8, 7], tails, read_cache=True))
    assert found.means == pytest.approx([-0.3, -0.4])
    assert sorted(prompt for _, prompt in asked) == [[7, 8, 7, 9, 3, 5], [7, 9, 3]]
    assert len({name for name, _ in asked}) == 2
    assert (found.versions, found.requests, found.forward, found.cached) == ([4, 4], 2, 9, 0)
    assert (found.rescored, found.aborted, found.error) == (0, False, None)
