"""The cause finder on policies whose fault is known to the digit, and where nothing can be said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from recipe.offpolicy.analysis.attribution.cause import NAMES, Cause
from recipe.offpolicy.analysis.attribution.causes import find_causes, find_temperature
from recipe.offpolicy.analysis.attribution.recorded_tokens import collect_tokens
from recipe.offpolicy.recording import Rows, concatenate
from tests.support.recordings import drawn_rows
from tests.support.simulated_policies import Engine, Size, at_temperature, noisy, simulated, stale, top_k, top_p


def present(causes: Sequence[Cause]) -> set[str]:
    return {cause.name for cause in causes if cause.verdict == "present"}


def of(causes: Sequence[Cause], name: str) -> Cause:
    return next(cause for cause in causes if cause.name == name)


def shifted(rows: Rows, by: int) -> Rows:
    """mu of the token ``by`` places before, within each row."""
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
    """log mu = z / T - log Z: within a context its slope on log pi_old is 1 / T."""
    causes = find_causes(simulated(at_temperature(temperature)), {})
    assert present(causes) == {"temperature"}
    evidence = of(causes, "temperature").evidence
    assert evidence["slope"] == pytest.approx(1 / temperature, abs=0.01)
    assert evidence["slope_low"] < evidence["slope"] < evidence["slope_high"]
    assert "rollout.temperature at the value at which the engine samples" in of(causes, "temperature").fix


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampled_at", "fix"),
    [
        (0.7, "rollout.temperature=0.7 "),
        (1, "rollout.temperature=1.0 "),
        (0.0, "at which the engine samples"),
        ("warm", "at which the engine samples"),
    ],
)
def test_a_temperature_is_mended_without_another_sampling(cold: Rows, sampled_at: object, fix: str) -> None:
    """The run's own temperature is what both sides are to have."""
    causes = find_causes(cold, {"sampling": {"temperature": sampled_at}})
    assert fix in of(causes, "temperature").fix
    assert of(causes, "temperature").fix.endswith("logprobs_mode=processed_logprobs")


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
@pytest.mark.parametrize("group", [8, 1])
@pytest.mark.parametrize("deviation", [3.0, 1.0, 2.0, 5.0])
def test_noise_cuts_nothing_off(deviation: float, group: int) -> None:
    """Of mu's samples few have a large pi_old / mu: their mean falls short of 1, and pi_old lies above mu too."""
    causes = find_causes(simulated(noisy(deviation), size=Size(group=group, prompts=128 // group)), {})
    assert not present(causes) & {"truncated sampling", "extra vocabulary"}


@pytest.mark.slow
def test_noise_of_three_nats_is_told_from_what_is_cut_off() -> None:
    cut = of(find_causes(simulated(noisy(3.0)), {}), "truncated sampling")
    assert cut.evidence["missing_low"] > 0.002
    assert cut.evidence["above"] > 1.0
    assert "cutting off mass cannot cause" in cut.sentence


@pytest.mark.slow
def test_truncated_sampling_amid_noise() -> None:
    """Noise of 0.3 nats does not hide a tenth of the mass."""
    cut, rough = top_p(0.9), noisy(0.3)
    assert "truncated sampling" in present(
        find_causes(simulated(lambda logits, step: cut(rough(logits, step), step)), {})
    )


@pytest.mark.slow
def test_extra_vocabulary_cuts_no_real_token() -> None:
    """One id of logit 2 among logits of deviation 1 to 4."""
    causes = find_causes(simulated(extra=2.0), {})
    assert present(causes) == {"extra vocabulary"}
    assert of(causes, "extra vocabulary").evidence["exhausted"] < 0.01


@pytest.mark.slow
def test_where_rows_cannot_tell_the_card_does() -> None:
    """Sixteen tokens of 48: no group of 8 rows samples them all."""
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
    """mu rolled by a prime over all rows: no token has its own, and no shift within a row fixes it."""
    rows = simulated()
    causes = find_causes(replace(rows, rollout_log_prob=np.roll(rows.rollout_log_prob, 777)), {})
    assert present(causes) == {"misalignment"}
    misaligned = of(causes, "misalignment")
    assert abs(misaligned.evidence["correlation_0"]) < 0.1
    assert "unrelated to log pi_old" in misaligned.sentence
    assert {cause.verdict for cause in causes if cause.name != "misalignment"} == {"not testable"}


def test_rows_of_one_token_can_be_unrelated() -> None:
    """Nothing stands next to them."""
    rows = drawn_rows([1] * 1024)
    assert of(find_causes(rows, {}), "misalignment").verdict == "not testable"
    rolled = replace(rows, rollout_log_prob=np.roll(rows.rollout_log_prob, 777))
    assert present(find_causes(rolled, {})) == {"misalignment"}


def test_near_constant_log_probs_may_be_uncorrelated() -> None:
    """Noise of 0.01 nats over log-probs that are all -1: no correlation, and a KL of 0.00005 nats."""
    noise = np.random.default_rng(0).normal(0.0, 0.01, (2, 1280)).astype(np.float32)
    rows = drawn_rows([20] * 64, rollout_log_prob=noise[0] - 1, old_log_prob=noise[1] - 1, log_prob=noise[1] - 1)
    misaligned = of(find_causes(rows, {}), "misalignment")
    assert misaligned.verdict == "absent"
    assert abs(misaligned.evidence["correlation_0"]) < 0.1


def test_a_step_that_correlates_speaks_against_misalignment() -> None:
    """Of five steps the first is healthy, the others' mu is rolled: the engine went wrong after it."""
    steps = [drawn_rows([20] * 32, step=step, seed=step) for step in range(1, 6)]
    wrong = [replace(rows, rollout_log_prob=np.roll(rows.rollout_log_prob, 77)) for rows in steps[1:]]
    causes = find_causes(concatenate([steps[0], *wrong]), {})
    assert "misalignment" not in present(causes)
    assert present(find_causes(concatenate(wrong), {})) == {"misalignment"}


def test_a_temperature_has_a_tight_slope_above_zero(cold: Rows) -> None:
    """A slope of -1 / 0.7, and one of 0.25 amid noise of 3 nats: both explain most of the gap by a straight line."""
    for rows in (replace(cold, rollout_log_prob=-cold.rollout_log_prob), simulated(noisy(3.0))):
        found = find_temperature(collect_tokens(rows), {})
        assert found.verdict == "absent"
        assert found.evidence["slope_high"] < 0.97
        assert found.evidence["explained_low"] > 0.5
        assert "which no temperature can explain" in found.sentence


def test_stale_weights_grow_and_reset() -> None:
    causes = find_causes(simulated(stale(3, 0.15), size=Size(steps=6, prompts=8)), {})
    assert present(causes) == {"stale weights"}
    evidence = of(causes, "stale weights").evidence
    assert evidence["resets"] == 1
    assert evidence["kl_step_2"] < evidence["kl_step_3"]
    assert evidence["kl_step_4"] < evidence["kl_step_2"]


def test_stale_rows_by_their_versions() -> None:
    """Where verl notes the versions, steps need not be compared."""
    fresh = simulated(size=Size(steps=1))
    old = simulated(
        noisy(0.3),
        size=Size(steps=1),
        seed=5,
    )
    aged = Rows(**{**vars(old), "step": np.full(128, 3), "oldest_version": np.full(128, 0)})
    causes = find_causes(concatenate([fresh, aged]), {})
    assert "stale weights" in present(causes)
    assert "2 steps" in of(causes, "stale weights").sentence
    # What is left, fresh rows, has no fault.
    assert present(causes) == {"stale weights"}


@pytest.mark.parametrize("turn", [1, 0])
def test_retokenisation_is_turn_local(turn: int) -> None:
    """The log-probs noted in one turn are of another distribution."""
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


def test_two_faults_at_once() -> None:
    """A re-tokenized turn does not hide a temperature in the other."""
    size = Size(turns=2, tokens=3)
    causes = find_causes(simulated(at_temperature(0.7), turns={1: noisy(3.0)}, size=size), {})
    assert present(causes) == {"re-tokenisation", "temperature"}


def test_without_groups_temperature_is_not_testable() -> None:
    """No two rows share a context: the slope cannot be known, and is not guessed."""
    causes = find_causes(simulated(at_temperature(0.7), size=Size(group=1, prompts=64)), {})
    assert of(causes, "temperature").verdict == "not testable"
    assert "rollout.n" in of(causes, "temperature").sentence


def test_nothing_to_judge_by() -> None:
    few = find_causes(drawn_rows([5, 5]), {})
    assert {cause.verdict for cause in few} == {"not testable"}
    rows = drawn_rows([20] * 32)
    bypassed = find_causes(replace(rows, old_log_prob=rows.rollout_log_prob), {})
    assert {cause.verdict for cause in bypassed} == {"not testable"}
    assert "proximal" in bypassed[0].sentence


@pytest.mark.parametrize("engine", [top_p(0.9), at_temperature(0.7), noisy(0.15)])
def test_the_order_of_rows_does_not_matter(engine: Engine) -> None:
    rows = simulated(engine, size=Size(steps=2))
    order = np.random.default_rng(0).permutation(len(rows))
    assert present(find_causes(rows, {})) == present(find_causes(rows.take(order), {}))
