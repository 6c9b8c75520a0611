"""Trials of the liveness proof: micro-batches beyond and within each bound, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from recipe.offpolicy.batch.micro_batch import MicroBatch
from recipe.offpolicy.batch.weight_versions import TokenVersions, read_versions
from recipe.offpolicy.correction import MaskSpec, WeightSpec
from recipe.offpolicy.correction.masks import AGGREGATES
from recipe.offpolicy.correction.read_parts import read_mask
from recipe.offpolicy.proof.trials import BEYOND, Trial, build_mask_trials, build_weight_trials


def rows() -> MicroBatch:
    """One row of two tokens."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    policies = {name: torch.full((1, 2), -1.0) for name in ("rollout_log_prob", "old_log_prob", "log_prob")}
    return MicroBatch(responses=mask.long(), response_mask=mask, advantages=torch.zeros(1, 2), **policies)


def rollout_ratio(trial: Trial) -> list[float]:
    return (trial.batch.old_log_prob - trial.batch.rollout_log_prob).exp()[0].tolist()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("truncate", {0.5: 0.5, 4.0: 2.0, 1.4142: 1.4142}), ("reject", {0.5: 0.5, 4.0: 0.0, 1.4142: 1.4142})],
)
def test_a_weight_is_tried_beyond_and_inside_its_cap(kind: str, expected: dict[float, float]) -> None:
    found = list(build_weight_trials(WeightSpec("token", kind, None, 2.0), rows()))  # type: ignore[arg-type]
    assert len(found) == len(expected)
    for trial, (raw, weight) in zip(found, expected.items(), strict=True):
        # Every other token is hit; the rest has weight 1.
        assert rollout_ratio(trial) == pytest.approx([raw, 1.0], rel=1e-3)
        assert trial.factor[0].tolist() == pytest.approx([weight, 1.0], rel=1e-3)
        assert trial.batch.advantages.tolist() == [[1.0, 1.0]]


def test_a_mask_is_tried_on_both_sides_of_both_bounds_for_both_signs() -> None:
    found = list(build_mask_trials("m", MaskSpec("rollout", "token", "product", 0.5, 2.0, "any"), rows()))
    seen = [(trial.label, trial.batch.advantages[0, 0].item(), trial.factor[0].tolist()) for trial in found]
    rejected, kept = [0.0, 1.0], [1.0, 1.0]
    assert seen == [
        (label if beyond else "", sign, rejected if beyond else kept)
        for label in ("side -1", "side +1")
        for sign in (-1.0, 1.0)
        for beyond in (True, False)
    ]
    below, inside = rollout_ratio(found[0])[0], rollout_ratio(found[1])[0]
    assert below == pytest.approx(0.5 * math.exp(-BEYOND), rel=1e-5)
    assert inside == pytest.approx(math.sqrt(0.5), rel=1e-5)


def test_a_mask_of_one_sign_keeps_the_other() -> None:
    found = list(build_mask_trials("m", MaskSpec("rollout", "sequence", "product", None, 2.0, "negative"), rows()))
    beyond, inside, other, mixed = found
    assert (beyond.batch.advantages[0, 0].item(), beyond.factor[0].tolist()) == (-1.0, [0.0, 0.0])
    assert inside.factor[0].tolist() == [1.0, 1.0]
    # The same ratio under a positive advantage is kept.
    assert rollout_ratio(other)[0] == pytest.approx(2.0 * math.exp(BEYOND), rel=1e-5)
    assert (other.batch.advantages[0, 0].item(), other.factor[0].tolist()) == (1.0, [1.0, 1.0])
    # -3 and 1: negative in the mean, by which a whole row is judged.
    assert mixed.batch.advantages.tolist() == [[-3.0, 1.0]]
    assert mixed.factor[0].tolist() == [0.0, 0.0]


def ages(trial: Trial) -> list[int]:
    assert trial.batch.plan is not None
    seen = read_versions(trial.batch.data, trial.batch.response_mask)
    assert isinstance(seen, TokenVersions)
    assert torch.equal(trial.batch.versions.tokens, seen.tokens)  # type: ignore[union-attr]
    return seen.compute_ages(trial.batch.plan.step, trial.batch.response_mask)[0].tolist()


def test_a_mask_on_age_is_tried_at_its_bound_and_a_version_beyond() -> None:
    """The first token of a row is old; the others come from the current weights."""
    stale = MaskSpec("rollout", "token", "staleness", None, 4.0, "any")
    found = list(build_mask_trials("stale", stale, rows()))
    seen = [
        (trial.label, trial.batch.advantages[0, 0].item(), ages(trial), trial.factor[0].tolist()) for trial in found
    ]
    beyond, inside = ([5, 0], [0.0, 1.0]), ([4, 0], [1.0, 1.0])
    assert seen == [
        ("side +1", sign, *beyond) if out else ("", sign, *inside) for sign in (-1.0, 1.0) for out in (1, 0)
    ]
    row = list(build_mask_trials("stale", replace(stale, level="sequence"), rows()))
    assert (ages(row[0]), row[0].factor[0].tolist()) == ([5, 0], [0.0, 0.0])


@pytest.mark.parametrize("name", AGGREGATES)
def test_each_aggregate_of_the_table_is_stated_and_has_a_trial_that_shows_each_bound(name: str) -> None:
    entry = AGGREGATES[name]
    mapping: dict[str, Any] = {"level": "sequence", "aggregate": name, "upper": entry.usual[1], "when": "any"}
    if entry.reduce == "batch":
        mapping = mapping | {"ratio": "rollout", "level": "token", "budget": mapping.pop("upper")}
    elif not entry.of_age:
        mapping |= {"ratio": "rollout", "lower": entry.usual[0]}
    spec = read_mask(mapping, key="correction.masks.m")
    shown = {trial.label for trial in build_mask_trials("m", spec, rows()) if (trial.factor == 0).any()}
    sides = {"side -1"} if entry.usual[0] is not None else set()
    assert shown - {""} == sides | {"side +1"}
