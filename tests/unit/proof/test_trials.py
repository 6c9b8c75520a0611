"""Trials of the liveness proof: micro-batches that lie beyond and inside each bound, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.batch.micro_batch import MicroBatch
from recipe.offpolicy.batch.token_versions import TokenVersions
from recipe.offpolicy.correction import MaskSpec, WeightSpec
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


def test_a_normalized_weight_is_divided_by_the_mean_that_is_sent() -> None:
    trial = next(iter(build_weight_trials(WeightSpec("token", "truncate", None, 2.0, normalize=True), rows())))
    assert trial.constants.weight_mean == 2.0
    assert trial.factor[0].tolist() == [0.25, 0.5]


def test_units_by_version_are_the_runs_of_one_version() -> None:
    """Version 3 sampled the first two response tokens and 4 the last; unit 0 is hit, unit 1 is not."""
    mask = torch.tensor([[False, True, True, False, True]])
    versions = TokenVersions(torch.tensor([3]), torch.tensor([4]), torch.tensor([[-1, 3, 3, -1, 4]]))
    policies = {name: torch.full((1, 5), -1.0) for name in ("rollout_log_prob", "old_log_prob", "log_prob")}
    batch = MicroBatch(
        responses=mask.long(), response_mask=mask, advantages=torch.zeros(1, 5), versions=versions, **policies
    )
    beyond = list(build_weight_trials(WeightSpec("version", "truncate", None, 2.0), batch))[1]
    assert beyond.factor[0][mask[0]].tolist() == [2.0, 2.0, 1.0]
    row = list(build_weight_trials(WeightSpec("sequence", "truncate", None, 2.0), batch))[1]
    assert row.factor[0][mask[0]].tolist() == [2.0, 2.0, 2.0]


def test_a_weight_of_a_sequence_hits_all_of_its_tokens() -> None:
    beyond = list(build_weight_trials(WeightSpec("sequence", "truncate", None, 2.0), rows()))[1]
    # The product of the row's ratios is 4, all of it on the first token.
    assert rollout_ratio(beyond) == pytest.approx([4.0, 1.0], rel=1e-5)
    assert beyond.factor[0].tolist() == [2.0, 2.0]


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


def test_the_budget_of_a_second_moment_is_sent_as_a_cutoff() -> None:
    spec = MaskSpec("rollout", "token", "second_moment", None, None, "any", budget=0.04)
    found = list(build_mask_trials("m2po", spec, rows()))
    assert all(trial.constants.cutoffs == {"m2po": 0.04} for trial in found)
    squares = [math.log(rollout_ratio(trial)[0]) ** 2 for trial in found]
    assert [square > 0.04 for square in squares] == [trial.factor[0, 0].item() == 0.0 for trial in found]
