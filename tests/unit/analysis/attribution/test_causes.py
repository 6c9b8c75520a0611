"""The cause finder on policies whose fault is known exactly, and on data that show nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from recipe.offpolicy.analysis.attribution.cause import NAMES, Cause
from recipe.offpolicy.analysis.attribution.causes import find_causes, find_temperature
from recipe.offpolicy.analysis.attribution.recorded_tokens import collect_tokens
from recipe.offpolicy.recording import Rows, concatenate
from tests.support.simulated_policies import Size, at_temperature, noisy, simulated, top_k, top_p


def present(causes: Sequence[Cause]) -> set[str]:
    return {cause.name for cause in causes if cause.verdict == "present"}


def of(causes: Sequence[Cause], name: str) -> Cause:
    return next(cause for cause in causes if cause.name == name)


def shifted(rows: Rows, by: int) -> Rows:
    """Return mu of the token ``by`` places before, within each row."""
    mu = np.concatenate(
        [np.roll(rows.rollout_log_prob[a:b], by) for a, b in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)]
    )
    return replace(rows, rollout_log_prob=mu)


@pytest.fixture(scope="module")
def cold() -> Rows:
    return simulated(at_temperature(0.7))


def test_healthy_engines() -> None:
    causes = find_causes(simulated(), {})
    assert [cause.name for cause in causes] == list(NAMES)
    assert present(causes) == set()
    assert of(causes, "re-tokenisation").verdict == "not testable"
    assert all(cause.sentence and not cause.fix for cause in causes)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_temperature_is_estimated(temperature: float) -> None:
    """log mu = z / T - log Z, so within a context, its slope on log pi_old is 1 / T."""
    causes = find_causes(simulated(at_temperature(temperature)), {})
    assert present(causes) == {"temperature"}
    evidence = of(causes, "temperature").evidence
    assert evidence["slope"] == pytest.approx(1 / temperature, abs=0.01)
    assert evidence["slope_low"] < evidence["slope"] < evidence["slope_high"]
    assert "rollout.temperature set to the temperature at which the engine samples" in of(causes, "temperature").fix


def test_truncated_sampling_is_a_constant_of_each_context() -> None:
    causes = find_causes(simulated(top_p(0.9)), {})
    assert present(causes) == {"truncated sampling"}
    # Of top-p 0.9 at most a tenth of the mass is missing.
    assert 0.02 < of(causes, "truncated sampling").evidence["missing"] < 0.1


def test_a_replayed_support_cuts_nothing_off() -> None:
    rows = simulated(top_p(0.9))
    replayed = {"top_p": 0.9, "support": "engine", "support_unknown": "mask"}
    causes = find_causes(rows, {"sampling": replayed})
    assert not present(causes) & {"truncated sampling", "extra vocabulary"}
    assert "renormalised over the support" in of(causes, "truncated sampling").sentence
    # Where tokens of unknown support keep the whole vocabulary, the rows are asked.
    partly = find_causes(rows, {"sampling": replayed | {"support_unknown": "full"}})
    assert "truncated sampling" in present(partly)


@pytest.mark.slow
def test_where_rows_cannot_tell_the_card_does() -> None:
    """With sixteen tokens of 48, no group of 8 rows samples all of them, so the rows cannot tell, but the card can."""
    rows = simulated(top_k(16))
    assert present(find_causes(rows, {})) == {"extra vocabulary"}
    causes = find_causes(rows, {"sampling": {"top_k": 16, "top_p": 1.0}})
    assert present(causes) == {"truncated sampling"}
    assert "top_k=16" in of(causes, "truncated sampling").sentence
    # A card alone is no evidence.
    assert present(find_causes(simulated(), {"sampling": {"top_k": 16}})) == set()


@pytest.mark.parametrize("by", [1, -1])
def test_misalignment_and_its_side(by: int) -> None:
    causes = find_causes(shifted(simulated(), by), {})
    assert present(causes) == {"misalignment"}
    assert ("before" if by == 1 else "after") in of(causes, "misalignment").sentence
    # Nothing else can be said.
    assert {cause.verdict for cause in causes if cause.name != "misalignment"} == {"not testable"}


def test_log_probs_of_other_rows_are_misalignment() -> None:
    """mu is rolled by a prime over all rows, so no token has its own mu, and no shift within a row fixes it."""
    rows = simulated()
    causes = find_causes(replace(rows, rollout_log_prob=np.roll(rows.rollout_log_prob, 777)), {})
    assert present(causes) == {"misalignment"}
    misaligned = of(causes, "misalignment")
    assert abs(misaligned.evidence["correlation_0"]) < 0.1
    assert "unrelated to log pi_old" in misaligned.sentence
    assert {cause.verdict for cause in causes if cause.name != "misalignment"} == {"not testable"}


def test_a_temperature_has_a_tight_slope_above_zero(cold: Rows) -> None:
    """A slope of -1 / 0.7, and a slope of 0.25 with noise of 3 nats: a straight line explains most of the gap
    in both.
    """
    for rows in (replace(cold, rollout_log_prob=-cold.rollout_log_prob), simulated(noisy(3.0))):
        found = find_temperature(collect_tokens(rows), {})
        assert found.verdict == "absent"
        assert found.evidence["slope_high"] < 0.97
        assert found.evidence["explained_low"] > 0.5
        assert "which no temperature can explain" in found.sentence


@pytest.mark.parametrize("turn", [1, 0])
def test_retokenisation_is_turn_local(turn: int) -> None:
    """The log-probs of one turn belong to another distribution."""
    size = Size(turns=2, tokens=3, prompts=16)
    causes = find_causes(simulated(turns={turn: noisy(1.0)}, size=size), {})
    assert present(causes) == {"re-tokenisation"}
    assert f"in turn {turn + 1} " in of(causes, "re-tokenisation").sentence
    assert present(find_causes(simulated(size=size), {})) == set()


def test_numerics_have_a_tail_and_no_sign() -> None:
    causes = find_causes(simulated(noisy(0.15)), {})
    assert present(causes) == {"numerics"}
    assert of(causes, "numerics").evidence["tail"] > 1.5
    assert "VLLM_BATCH_INVARIANT=1" in of(causes, "numerics").fix
    assert "or correct for the mismatch: 'correction=" in of(causes, "numerics").fix


def test_without_groups_temperature_is_not_testable() -> None:
    """No two rows share a context, so the slope is unknown."""
    causes = find_causes(simulated(at_temperature(0.7), size=Size(group=1, prompts=64)), {})
    assert of(causes, "temperature").verdict == "not testable"
    assert "rollout.n" in of(causes, "temperature").sentence


STEPS, PROMPTS, GROUP, TOKENS = 4, 16, 8, 6
Error = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]
"""Maps the step and the prompt number of a row to the deviation of the logits that sampled it; 0 is healthy."""


@functools.cache
def sampled_with(deviation: float) -> Rows:
    size = Size(steps=STEPS, prompts=PROMPTS, group=GROUP, tokens=TOKENS)
    return simulated(noisy(deviation), size=size) if deviation else simulated(size=size)


def asked(again: int, error: Error) -> Rows:
    """Rows of ``STEPS`` steps; the first ``again`` prompts are the same in each step."""
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
    """4 of 16 prompts are repeated, so no step as a whole is certainly staler than another."""
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


def test_old_weights_are_not_taken_for_a_kept_cache() -> None:
    """An update changes most the prompts that it was trained on, so repeated prompts have a larger gap, and new prompts
    have a gap too.
    """
    found = verdict(asked(8, lambda step, prompt: np.where((step > 1) & (prompt < 8), 0.4, 0.1 * (step > 1))))
    assert found.verdict == "present"
    assert found.evidence["again_low"] > 3
    assert "new prompts are affected too; the cache may also be stale" in found.sentence
    assert "clear the engine's cache" in found.fix
    assert "max_off_policy_threshold" in found.fix
