"""Stale weights told from keys and values of older weights that an engine's prefix cache has kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from recipe.offpolicy.analysis.attribution.cause import Cause
from recipe.offpolicy.analysis.attribution.causes import find_causes
from recipe.offpolicy.analysis.attribution.partial_causes import find_stale_weights
from recipe.offpolicy.analysis.attribution.recorded_tokens import SampledTokens, collect_tokens, compute_k3
from recipe.offpolicy.recording import Rows, concatenate
from tests.support.simulated_policies import Size, noisy, simulated

STEPS, PROMPTS, GROUP, TOKENS = 4, 16, 8, 6
Error = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]
"""From the step and the number of each row's prompt to the deviation of the logits that sampled it; 0: healthy."""


@functools.cache
def sampled_with(deviation: float) -> Rows:
    size = Size(steps=STEPS, prompts=PROMPTS, group=GROUP, tokens=TOKENS)
    return simulated(noisy(deviation), size=size) if deviation else simulated(size=size)


def asked(again: int, error: Error) -> Rows:
    """Rows of ``STEPS`` steps, of whose prompts the first ``again`` are the same at each step."""
    healthy = sampled_with(0.0)
    prompt = np.arange(len(healthy)) // GROUP % PROMPTS
    ids = np.where(prompt < again, prompt, 100 * healthy.step + prompt).astype(np.int32)
    deviation = error(healthy.step, prompt)
    parts = []
    for value in np.unique(deviation):
        rows = sampled_with(float(value))
        told = replace(rows, prompt_ids=ids, prompt_offsets=np.arange(len(rows) + 1))
        parts.append(told.take(np.flatnonzero(deviation == value)))
    return concatenate(parts)


def without_prompts(rows: Rows) -> Rows:
    return replace(rows, prompt_ids=rows.prompt_ids[:0], prompt_offsets=0 * rows.prompt_offsets)


def verdict(rows: Rows) -> Cause:
    causes = find_causes(rows, {})
    assert {cause.name for cause in causes if cause.verdict == "present"} <= {"stale weights"}
    return next(cause for cause in causes if cause.name == "stale weights")


@pytest.mark.slow
def test_a_kept_cache_is_seen_where_steps_hardly_differ() -> None:
    """4 of 16 prompts come again, so that no step as a whole is certain to be staler than another."""
    rows = asked(4, lambda step, prompt: 0.04 * ((step > 1) & (prompt < 4)))
    found = verdict(rows)
    assert found.verdict == "present"
    # Logits with an error of 0.04 next to one of 0.01: 1 + 16 times the variance, and the KL with it.
    assert found.evidence["again"] == pytest.approx(17, rel=0.2)
    assert found.evidence["again_low"] > 3
    assert found.evidence["kl_again"] == pytest.approx(found.evidence["again"] * found.evidence["kl_new"], rel=1e-6)
    assert "prefix cache" in found.sentence
    assert "enable_prefix_caching=False" in found.fix
    assert "max_off_policy_threshold" not in found.fix
    assert verdict(without_prompts(rows)).verdict == "absent"


@pytest.mark.slow
def test_stale_weights_act_on_new_prompts_as_well() -> None:
    found = verdict(asked(8, lambda step, prompt: 0.1 * (step > 2)))
    assert found.verdict == "present"
    assert found.evidence["again"] == pytest.approx(1, abs=0.4)
    assert "so the weights are stale" in found.sentence
    assert "enable_prefix_caching" not in found.fix


def test_old_weights_are_not_taken_for_a_kept_cache() -> None:
    """An update moves most what it was trained on: prompts that come again have more of the gap, and new ones too."""
    found = verdict(asked(8, lambda step, prompt: np.where((step > 1) & (prompt < 8), 0.4, 0.1 * (step > 1))))
    assert found.verdict == "present"
    assert found.evidence["again_low"] > 3
    assert "new prompts are affected too; the cache may be as well" in found.sentence
    assert "clear the engine's cache" in found.fix
    assert "max_off_policy_threshold" in found.fix


def test_a_wide_interval_tells_nothing_apart() -> None:
    """4 of 12 prompts that come again have a gap, in one step of four."""
    found = verdict(asked(12, lambda step, prompt: 0.1 * ((step > 3) & (prompt < 4))))
    assert found.verdict == "present"
    assert found.evidence["again_low"] < 3 < found.evidence["again_high"]
    assert "does not show whether the weights or the cache are stale" in found.sentence


def test_new_prompts_too_few_by_step_leave_both_open() -> None:
    """Of a step, 4 of 16 prompts are new: together enough to compare, and not step by step."""
    rows = asked(12, lambda step, prompt: 0.1 * ((step > 1) & (prompt < 12)))
    found = verdict(rows)
    assert found.verdict == "present"
    assert "too few new prompts to tell whether the engine has older weights" in found.sentence
    assert "max_off_policy_threshold" in found.fix
    enough = verdict(asked(8, lambda step, prompt: 0.1 * ((step > 1) & (prompt < 8))))
    assert "prefix cache holds keys and values computed with older weights" in enough.sentence


def test_without_prompts_of_both_kinds_it_is_said_what_is_lacking() -> None:
    rows = asked(PROMPTS, lambda step, prompt: 0.1 * (step > 2))
    found = verdict(rows)
    assert found.verdict == "present"
    assert "new prompts are needed alongside repeated ones" in found.sentence
    assert "again" not in found.evidence
    new = verdict(asked(0, lambda step, prompt: 0.1 * (step > 2)))
    assert new.verdict == "present"
    assert "every step has new prompts, so either the weights are stale" in new.sentence
    unread = verdict(without_prompts(rows))
    assert unread.verdict == "present"
    assert "record the prompts to find out" in unread.sentence


def test_prompts_that_come_again_are_healthy_by_themselves() -> None:
    found = verdict(asked(8, lambda step, prompt: 0.0 * step))
    assert found.verdict == "absent"
    assert found.evidence["again_low"] < 1 < found.evidence["again_high"]


def test_how_long_ago_a_prompt_first_came() -> None:
    rows = asked(2, lambda step, prompt: 0.0 * step)
    sampled = collect_tokens(rows)
    again = rows.prompt_ids[sampled.row] < 2
    assert set(sampled.again[again] - sampled.step[again]) == {-1}
    assert set(sampled.again[~again]) == {0}
    assert set(sampled.take(again).again) == {0, 1, 2, 3}


def test_the_factor_compares_within_a_step() -> None:
    """Two steps, by hand: (100 a + 200 c) / (100 b + 200 d), new rows being spread as those that come again."""
    groups = [(2, 1, 100, 0.3), (2, 0, 300, 0.1), (3, 2, 200, 0.8), (3, 0, 100, 0.2), (1, 0, 500, 5.0)]
    step, again, gap = (
        np.concatenate([np.full(count, (number, age, value)[which]) for number, age, count, value in groups])
        for which in (0, 1, 2)
    )
    count = len(step)
    mu = np.full(count, -1.0)
    zero = np.zeros(count, dtype=np.int64)
    sampled = SampledTokens(
        row=zero,
        place=zero,
        mu=mu,
        old=mu + gap,
        pi=mu + gap,
        turn=zero,
        index=np.arange(count),
        step=step.astype(np.int64),
        staleness=zero,
        cluster=np.arange(count) // 10,
        context=np.arange(count),
        token_id=zero,
        again=again.astype(np.int64),
    )
    found, _ = find_stale_weights(sampled)
    a, b, c, d = (float(compute_k3(np.array(value))) for value in (0.3, 0.1, 0.8, 0.2))
    assert found.evidence["again"] == pytest.approx((100 * a + 200 * c) / (100 * b + 200 * d), rel=1e-9)
    assert found.evidence["kl_again"] == pytest.approx((100 * a + 200 * c) / 300, rel=1e-9)
