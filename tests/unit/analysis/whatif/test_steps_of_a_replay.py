"""Steps of a replay, from the two stages to gradient weights and groups, worked out on two rows by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from recipe.offpolicy.analysis.whatif.base_loss import BaseLoss
from recipe.offpolicy.analysis.whatif.blocks import Block, pad_rows
from recipe.offpolicy.analysis.whatif.fidelity import compare_with_record
from recipe.offpolicy.analysis.whatif.gradient_sums import (
    COLUMNS,
    INDEX,
    TURN_GROUPS,
    build_grouping,
    build_reference_block,
    compute_gradient_weight,
)
from recipe.offpolicy.analysis.whatif.measures import TurnShare, compute_measures, compute_turn_shares
from recipe.offpolicy.analysis.whatif.replay import check_replayable, compute_constants, compute_pi_old, decide
from recipe.offpolicy.correction import BatchConstants, SpecError
from recipe.offpolicy.recording import Rows
from tests.support.acted import acted, by_hand
from tests.support.corrections import M2PO, TIS, band, spec
from tests.support.recordings import sampled_by

LOG2 = math.log(2.0)
# pi_old / mu by token: row 0 (A = 1): 4, 1, 1/2; row 1 (A = -2): 2, 2. pi / pi_old: 2 on the first token, else 1.
MU = [[-3.0, -2.0, -1.0], [-2.0, -2.0]]
OLD = [[-3.0 + 2 * LOG2, -2.0, -1.0 - LOG2], [-2.0 + LOG2, -2.0 + LOG2]]
PI = np.array([-3.0 + 3 * LOG2, -2.0, -1.0 - LOG2, -2.0 + LOG2, -2.0 + LOG2], dtype=np.float32)
A = np.array([1, 1, 1, -2, -2], dtype=np.float32)
NONE, TOKEN_TIS = spec(), spec(TIS)
BAND = spec(None, band=band(0.5, 1.7))  # geometric means: row 0 (4 * 1 * 1/2)^(1/3) = 1.26, row 1 2.0


def rows() -> Rows:
    return by_hand(OLD, MU, log_prob=PI, advantages=A)


def whole(of: Rows) -> Block:
    return pad_rows(of, np.arange(len(of)))


def test_a_decision_is_that_of_the_two_stages() -> None:
    weighted = decide(TOKEN_TIS, NONE, whole(rows()), BatchConstants())
    assert weighted.weight[0].tolist() == pytest.approx([2.0, 1.0, 0.5])
    assert weighted.weight[1, :2].tolist() == pytest.approx([2.0, 2.0])
    masked = decide(BAND, NONE, whole(rows()), BatchConstants())
    assert masked.keep.tolist() == [[True, True, True], [False, False, False]]
    (reason,) = masked.rejected
    assert masked.rejected[reason][1, :2].all()


def test_constants_are_those_of_the_whole_step() -> None:
    """Self-normalisation divides by the mean of min(rho, 2) = 2, 1, 1/2, 2, 2; second moments cut across all tokens."""
    assert compute_constants(TOKEN_TIS, NONE, rows()) == BatchConstants()
    normalised = compute_constants(spec(TIS | {"normalize": True}), NONE, rows())
    again = decide(spec(TIS | {"normalize": True}), NONE, whole(rows()), normalised)
    assert again.weight[0].tolist() == pytest.approx([2.0 / 1.5, 1.0 / 1.5, 0.5 / 1.5])
    assert compute_constants(spec(None, m2po=M2PO), NONE, rows()) != BatchConstants()


def test_what_was_not_recorded_is_not_replayed() -> None:
    bypassed = replace(NONE, proximal="bypass")
    check_replayable(TOKEN_TIS, NONE, rows())
    check_replayable(bypassed, bypassed, rows())
    with pytest.raises(SpecError, match=r"correction\.proximal=recompute: recorded with correction\.proximal=bypass"):
        check_replayable(TOKEN_TIS, bypassed, rows())
    one_engine = replace(NONE, proximal="same_engine")
    with pytest.raises(SpecError, match=r"recorded with correction\.proximal=bypass, so that pi_old was not computed"):
        check_replayable(one_engine, bypassed, rows())
    by_version = spec(TIS | {"level": "version"})
    known = sampled_by(rows(), [3, 4])
    check_replayable(by_version, NONE, known)
    mixed = sampled_by(known, [2, -1], [3, -1])
    with pytest.raises(SpecError, match="of 2 of 2 rows it is not known which version of the weights sampled"):
        check_replayable(by_version, NONE, mixed)


def test_mu_in_the_place_of_pi_old_is_replayed_where_the_run_would_have_gone_on() -> None:
    """rho is 4, 1, 1/2 and twice more than 1: four of five tokens differ. Alike, both engines are one."""
    one_engine = replace(NONE, proximal="same_engine")
    with pytest.raises(SpecError, match=r"of 5 tokens mu differs from pi_old by more than 1e-06 nats on 4, so that"):
        check_replayable(one_engine, NONE, rows())
    alike = replace(rows(), old_log_prob=rows().rollout_log_prob)
    check_replayable(one_engine, NONE, alike)
    check_replayable(TOKEN_TIS, one_engine, alike)
    assert torch.equal(compute_pi_old(one_engine, NONE, whole(alike)), whole(alike).rollout_log_prob)


def test_units_by_version_are_those_of_the_tokens() -> None:
    """Ratios of 4, 1 and 1/2 in a row whose last token a newer version sampled: units of 4 and 1/2."""
    by_version = spec(TIS | {"level": "version", "upper": 9.0})
    noted = replace(rows(), version=np.array([3, 3, 4, 4, 4], dtype=np.int32))
    check_replayable(by_version, NONE, noted)
    found = decide(by_version, NONE, whole(noted), BatchConstants())
    assert found.weight[0].tolist() == pytest.approx([4.0, 4.0, 0.5])


AGED = np.array([0, 2, 2, 3, 1], dtype=np.int32)
"""Versions by token of rows of step 5: ages 4, 2, 2 and 1, 3."""
STALE = spec(stale={"aggregate": "staleness", "level": "token", "upper": 2})


def test_what_goes_by_age_is_replayed_by_the_versions_of_the_tokens() -> None:
    noted = replace(rows(), step=np.full(2, 5), version=AGED)
    check_replayable(STALE, NONE, noted)
    masked = decide(STALE, NONE, whole(noted), BatchConstants())
    assert masked.keep.tolist() == [[False, True, True], [True, False, False]]
    capped = decide(spec(TIS | {"upper": 1.2, "by_staleness": [1, 1, 2, 3]}), NONE, whole(noted), BatchConstants())
    assert capped.weight.tolist() == [pytest.approx([1.2**3, 1.0, 0.5]), pytest.approx([1.2, 1.2**3, 0.0])]
    normalised = compute_constants(spec(TIS | {"by_staleness": [1, 1, 0.5], "normalize": True}), NONE, noted)
    assert normalised.weight_mean == pytest.approx((2**0.5 + 1 + 0.5 + 2 + 2**0.5) / 5)


def test_a_token_of_an_unknown_version_is_as_old_as_its_row() -> None:
    mixed = sampled_by(replace(rows(), step=np.full(2, 5)), [3, 1], [4, 3])
    check_replayable(STALE, NONE, mixed)
    assert decide(STALE, NONE, whole(mixed), BatchConstants()).keep.any(-1).tolist() == [True, False]
    with pytest.raises(SpecError, match="goes by the age of the weights: of 1 of 2 rows"):
        check_replayable(STALE, NONE, sampled_by(mixed, [3, -1], [4, -1]))


def test_what_no_correction_changes() -> None:
    """rho = pi / mu by token 8, 1, 1/2 | 2, 2 and by row 4 | 4; k3 = rho - 1 - log rho."""
    found = build_reference_block(whole(rows()), BaseLoss())
    assert found.references["token"][0].tolist() == pytest.approx([8.0, 1.0, 0.5])
    assert found.references["sequence"][:, 0].tolist() == pytest.approx([4.0, 4.0])
    assert found.mismatch[0].tolist() == pytest.approx([7 - 3 * LOG2, 0.0, -0.5 + LOG2], abs=1e-6)
    assert found.advantages.tolist() == [[1.0, 1.0, 1.0], [-2.0, -2.0, 0.0]]
    assert found.counted[1].tolist() == [1.0, 1.0, 0.0], "padding is not counted"


def test_gradient_weights() -> None:
    """w k r s: r = pi / pi_old is 2 on the first token; a weight on pi / mu stands in for it."""
    block = whole(rows())
    reference = build_reference_block(block, BaseLoss("vanilla"))
    weighted = decide(TOKEN_TIS, NONE, block, BatchConstants())
    found = compute_gradient_weight(TOKEN_TIS, weighted, reference)
    assert found.flatten().tolist() == pytest.approx([2.0 * 2, 1.0, 0.5, 2.0, 2.0, 0.0])
    scaled = compute_gradient_weight(TOKEN_TIS, weighted, reference, np.array([1.0, 3.0]))
    assert scaled.flatten().tolist() == pytest.approx([4.0, 1.0, 0.5, 6.0, 6.0, 0.0])
    masked = compute_gradient_weight(BAND, decide(BAND, NONE, block, BatchConstants()), reference)
    assert masked.flatten().tolist() == pytest.approx([2.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    full = replace(spec(TIS | {"ratio": "full"}), proximal="bypass")
    of_full = compute_gradient_weight(full, decide(full, full, block, BatchConstants()), reference)
    assert of_full.flatten().tolist() == pytest.approx([2.0, 1.0, 0.5, 2.0, 2.0, 0.0]), (
        "min(rho, 2), and no ratio alongside"
    )


def test_groups_split_by_length_sign_and_staleness() -> None:
    """Rows of 3 and 2 tokens lie in the first bucket of length; sums of a column are by group, then by bucket."""
    old = replace(rows(), step=np.array([5, 5]), oldest_version=np.array([4, 2]), newest_version=np.array([4, 2]))
    grouping = build_grouping(old)
    sums = grouping.sum_rows(np.array([[10.0], [1.0]]))[:, :, 0]
    by_group = dict(zip(grouping.names, sums.sum(-1).tolist(), strict=True))
    assert by_group[""] == 11.0
    assert (by_group["advantage/positive"], by_group["advantage/negative"]) == (10.0, 1.0)
    assert (by_group["staleness/is0"], by_group["staleness/is1"], by_group["staleness/is2"]) == (10.0, 0.0, 1.0)
    assert sums[0].tolist() == [11.0] + [0.0] * (sums.shape[1] - 1)


def test_measures_are_ratios_of_sums() -> None:
    sums = np.zeros((2, len(COLUMNS)))
    for name, value in {"tokens": 8, "kept": 6, "valid": 8, "applied": 6, "applied_square": 9, "rows": 2}.items():
        sums[0, INDEX[name]] = value
    found = compute_measures(sums)
    assert (found.tokens, found.rows) == (8, 2)
    assert found.kept_tokens == 0.75
    assert found.ess == 6**2 / (8 * 9)
    assert found.mismatch_left is None, "there is none to have a share of"
    assert found.bias_sequence is None, "no row is a reference"


def test_kept_shares_of_turns() -> None:
    sums = np.zeros((1, len(COLUMNS)))
    sums[0, INDEX["turn/is0/tokens"]], sums[0, INDEX["turn/is0/kept"]] = 4, 3
    found = compute_turn_shares(sums)
    assert found["turn/is0"] == TurnShare(4, 0.75)
    assert all(found[f"turn/{name}"] == TurnShare(0, None) for name in TURN_GROUPS[1:])


def test_a_replay_is_held_against_the_record() -> None:
    done, reasons = acted(rows(), BAND)
    block = whole(done)
    decision = decide(BAND, BAND, block, BatchConstants())
    same = compare_with_record(decision, block, reasons, step=7)
    assert same.agrees
    assert (same.tokens, same.example) == (5, "")
    other_bit = whole(replace(done, rejected_by=np.array([0, 1, 0, 1, 1], dtype=np.uint32)))
    found = compare_with_record(decision, other_bit, reasons, step=7)
    assert (found.rejections, found.weights) == (1, 0)
    assert found.example == "step 7, row 0, token 1: recorded rejected_by 1, replayed 0"
    other_weight = whole(replace(done, weight=np.array([1, 1, 1.25, 1, 1], dtype=np.float32)))
    found = compare_with_record(decision, other_weight, reasons, step=7)
    assert (found.rejections, found.weights, found.weight_error) == (0, 1, pytest.approx(0.2))
    assert found.example == "step 7, row 0, token 2: recorded weight 1.25, replayed 1"


def test_tensors_of_a_decision_lie_on_the_block() -> None:
    decision = decide(TOKEN_TIS, NONE, whole(rows()), BatchConstants())
    assert decision.old_log_prob.shape == decision.valid.shape == decision.keep.shape == torch.Size([2, 3])
