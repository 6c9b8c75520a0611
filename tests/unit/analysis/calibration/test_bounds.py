"""Bounds from recordings: the values that a mask compares are those of training, and a replay reaches the target."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.offpolicy.analysis.calibration.kept_bounds import compute_kept_share, find_bound_for_kept_share
from recipe.offpolicy.analysis.calibration.parts import BoundedPart, list_parts, set_values
from recipe.offpolicy.analysis.calibration.propose import CalibrationRequest, propose_bounds
from recipe.offpolicy.analysis.calibration.scores import Scores, compute_scores
from recipe.offpolicy.correction import CorrectionSpec, SpecError, batch_constants, rollout_stage, step_stage
from recipe.offpolicy.recording import Rows, Step
from tests.support.examples import at_most
from tests.support.recordings import NONE, drawn_rows

GEOMETRIC = {"ratio": "rollout", "level": "sequence", "aggregate": "geometric", "when": "any"}
BAND = GEOMETRIC | {"lower": 0.99, "upper": 1.01}
ANY = GEOMETRIC | {"aggregate": "any", "lower": 0.9, "upper": 1.1}
M2PO = {"ratio": "rollout", "level": "token", "aggregate": "second_moment", "budget": 0.0002, "when": "any"}
OPSM = {"ratio": "full", "level": "sequence", "aggregate": "geometric", "delta": 0.01, "when": "negative"}
MASKS = {
    "of turns": BAND | {"level": "turn"},
    "any of the row": ANY,
    "token": ANY | {"level": "token"},
    "binary_tv": ANY | {"aggregate": "binary_tv", "level": "token", "lower": -0.02, "upper": 0.02},
    "m2po": M2PO,
    "opsm": OPSM,
    "by token's sign": OPSM | {"sign": "token"},
}


def spec_of(mask: dict[str, Any] | None = None, weight: dict[str, Any] | None = None) -> CorrectionSpec:
    return CorrectionSpec.from_mapping({"weight": weight, "masks": {} if mask is None else {"it": mask}})


def steps_of(*rows: Rows) -> list[Step]:
    return [Step(each, NONE, ()) for each in rows]


def drawn(seed: int = 0, count: int = 100, step: int = 1, **columns: Any) -> Rows:
    """Rows of 1 to 40 tokens in three turns separated by tool tokens, in groups of 4."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 41, count)
    turn = np.concatenate([np.minimum(np.arange(length) // 8, 2) for length in lengths]).astype(np.int16)
    mask = np.concatenate([np.arange(length) % 8 != 7 for length in lengths])
    uid = np.array([f"{step}-{row // 4}" for row in range(count)], dtype=object)
    rows = drawn_rows(lengths, seed=seed, step=step, backend=0.03, drift=0.01, uid=uid, **columns)
    counted = np.array([mask[a:b].sum() for a, b in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)])
    return replace(rows, response_mask=mask, turn=np.where(mask, turn, -1), length=counted.astype(np.int32))


def replayed_share(spec: CorrectionSpec, steps: list[Step]) -> float:
    """Kept units divided by all units, computed by the training stages; the mask defines the units."""
    key, part = next(iter([(f"masks.{n}", m) for n, m in spec.masks] or [("weight", spec.weight)]))
    kept = total = 0
    for step in steps:
        tensors = step.rows.padded(
            "rollout_log_prob", "old_log_prob", "log_prob", "advantages", "turn", "token_staleness"
        )
        rollout = {
            "old_log_prob": tensors["old_log_prob"],
            "rollout_log_prob": tensors["rollout_log_prob"],
            "response_mask": tensors["response_mask"],
            "segment_ids": tensors["turn"].long(),
            "staleness": tensors["token_staleness"],
        }
        stage = rollout_stage(spec, constants=batch_constants(spec, **rollout), **rollout)
        after = step_stage(spec, stage, log_prob=tensors["log_prob"], advantages=tensors["advantages"])
        drop, valid = after.rejected[key].expand(stage.valid.shape), stage.valid
        by_token = part.level == "token" or getattr(part, "sign", "row") == "token"
        for row in range(len(step.rows)):
            ids = tensors["turn"][row] if part.level == "turn" else torch.zeros_like(tensors["turn"][row])
            ids = torch.arange(len(ids)) if by_token else ids
            units = dict(zip(ids[valid[row]].tolist(), drop[row, valid[row]].tolist(), strict=True))
            kept, total = kept + sum(not dropped for dropped in units.values()), total + len(units)
    return kept / total


def part_and_scores(spec: CorrectionSpec, steps: list[Step]) -> tuple[BoundedPart, Scores]:
    (part,) = list_parts(spec)
    scores, _ = compute_scores(steps, spec, [part])
    return part, scores[part.key]


def of_all(scores: Scores, share: float) -> float:
    """Convert a share of the units that a mask tests to a share of all units."""
    return 1 - float(scores.looked.mean()) * (1 - share) if scores.looked.any() else 1.0


@pytest.mark.parametrize("name", MASKS)
def test_replaying_the_proposed_bound_gives_the_target(name: str) -> None:
    """The result is the smallest share that units allow: exactly ceil(target n) of the n tested units are kept.

    Tokens that a row decides are kept or dropped together, so there may be up to 36 more.
    """
    spec, steps, target = spec_of(MASKS[name]), steps_of(drawn(3), drawn(4, step=2)), 0.9
    part, scores = part_and_scores(spec, steps)
    found = find_bound_for_kept_share(part, scores, target, 0.95)
    share = replayed_share(set_values(spec, "masks.it", found.values), steps)
    looked = int(scores.looked.sum())
    least = len(scores) - looked + math.ceil(target * looked - 1e-9)
    slack = 36 if name == "by token's sign" else 0
    assert least <= round(share * len(scores)) <= least + slack
    assert of_all(scores, found.reached) == pytest.approx(share, abs=1e-12)


def aged(seed: int) -> Rows:
    """Rows whose first 5 tokens are 0 to 3 versions older than the others, which are 0 or 1 versions old."""
    rows = drawn(seed, step=9)
    young = np.arange(len(rows))[rows.row_of_token] % 2
    older = np.where(rows.position < 5, (np.arange(len(rows)) % 4)[rows.row_of_token], 0)
    return replace(rows, version=(8 - young - older).astype(np.int32))


AGED = {
    "by token": (ANY | {"level": "token", "by_staleness": [1.0, 0.25, 0.5]}, 0.9),
    "a delta": (OPSM | {"by_staleness": [0.5, 1.0]}, 0.9),
    "age by turn": ({"aggregate": "staleness", "level": "turn", "upper": 1, "when": "negative"}, 0.9),
}


@pytest.mark.parametrize("name", AGED)
def test_what_goes_by_age_is_read_as_training_reads_it(name: str) -> None:
    mask, target = AGED[name]
    spec, steps = spec_of(mask), steps_of(aged(1), aged(2))
    part, scores = part_and_scores(spec, steps)
    share = replayed_share(spec, steps)
    assert 0 < share < 1
    assert of_all(scores, compute_kept_share(part, scores, part.limits)) == pytest.approx(share, abs=1e-12)
    found = find_bound_for_kept_share(part, scores, target, 0.95)
    moved = set_values(spec, "masks.it", found.values)
    assert moved.age_parts.keys() == {"masks.it"}
    assert found.reached >= target
    assert of_all(scores, found.reached) == pytest.approx(replayed_share(moved, steps), abs=2 / len(scores))


@settings(max_examples=at_most(60))
@given(
    seed=st.integers(0, 10**6),
    aggregate=st.sampled_from(["product", "geometric", "any", "k1_sum", "k1_max", "k2_mean", "k3_sum", "tv_max"]),
    level=st.sampled_from(["token", "sequence", "turn"]),
    ratio=st.sampled_from(["rollout", "full", "ppo"]),
    when=st.sampled_from(["any", "negative", "positive"]),
    radius=st.floats(0.001, 0.1),
)
def test_any_mask_is_read_as_training_reads_it(
    seed: int, aggregate: str, level: str, ratio: str, when: str, radius: float
) -> None:
    on_ratio = aggregate in ("product", "geometric", "any")
    bounds = {"lower": math.exp(-radius), "upper": math.exp(radius)} if on_ratio else {"lower": None, "upper": radius}
    spec = spec_of({"ratio": ratio, "level": level, "aggregate": aggregate, "when": when, **bounds})
    steps = steps_of(drawn(seed, count=12))
    part, scores = part_and_scores(spec, steps)
    assert of_all(scores, compute_kept_share(part, scores, part.limits)) == pytest.approx(
        replayed_share(spec, steps), abs=1e-12
    )


def test_symmetric_in_log_space_and_rounded_outward() -> None:
    """Rows of one token with log rho -0.03, -0.01, 0.02, 0.05: keeping 3 of 4 needs |log rho| <= 0.03.

    exp(0.03) = 1.030455 and exp(-0.03) = 0.970446. With two digits, rounded outward, the bounds would be log 1.04 =
    0.039 and -log 0.97 = 0.03046; the first is more than 2 % too large, so both get three digits: 1.031 (0.03053) and
    0.970 (0.03046).
    """
    old = np.array([-1.03, -1.01, -0.98, -0.95], dtype=np.float32)
    rows = drawn_rows([1] * 4, rollout_log_prob=np.full(4, -1.0, np.float32), old_log_prob=old)
    part, scores = part_and_scores(spec_of(BAND), steps_of(rows))
    found = find_bound_for_kept_share(part, scores, 0.75, 0.95)
    assert found.radius == pytest.approx(0.03, abs=1e-6)
    assert found.values == {"lower": 0.97, "upper": 1.031}
    assert found.reached == 0.75


def test_the_target_is_of_what_the_mask_looks_at() -> None:
    """Of 100 rows, the mask tests the 10 with negative advantage; 0.8 of these is 8, so 98 of 100 are kept."""
    sign = np.where(np.arange(100) % 10 == 0, -1.0, 1.0)
    rows = drawn(9)
    rows = replace(rows, advantages=np.repeat(sign, np.diff(rows.offsets)).astype(np.float32))
    spec = spec_of(OPSM)
    part, scores = part_and_scores(spec, steps_of(rows))
    found = find_bound_for_kept_share(part, scores, 0.8, 0.95)
    assert (found.reached, found.count) == (0.8, 10)
    assert replayed_share(set_values(spec, part.key, found.values), steps_of(rows)) == 0.98
    none = replace(rows, advantages=np.ones_like(rows.advantages))
    part, scores = part_and_scores(spec, steps_of(none))
    found = find_bound_for_kept_share(part, scores, 0.8, 0.95)
    assert not found.values
    assert "not identified: it applies to none of the rows" in found.note


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (CalibrationRequest(), "no target"),
        (CalibrationRequest(target_kept=1.0), "--target-kept 1.0"),
        (
            CalibrationRequest(target_ess=0.9),
            "no part of the correction can use the given target.* takes --target-kept",
        ),
    ],
)
def test_targets_that_cannot_be_meant(request_: CalibrationRequest, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        propose_bounds(steps_of(drawn()), spec_of(BAND), request_)
