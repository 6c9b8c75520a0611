"""The two stages: their errors, what they pass on, and rows on which nothing is decided."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from recipe.offpolicy.correction import BatchConstants, CorrectionSpec, rollout_stage, step_stage
from tests.support.corrections import GSM, M2PO, TIS, band, first_stage, opsm, run, spec, values

NAN, INF = math.nan, math.inf
STACK = spec(TIS, gsm=GSM, opsm=opsm(0.1), drift=band(0.5, 2.0, aggregate="product", ratio="ppo"))


# What the rollout stage knows -------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [spec(), spec(TIS | {"upper": 3.0}), spec(TIS, gsm=GSM)])
def test_the_stages_are_of_one_correction(other: CorrectionSpec) -> None:
    """Otherwise, a weight that depends on the step would silently be missing."""
    ones = torch.ones(1, 1)
    stage = rollout_stage(spec(TIS), old_log_prob=ones, rollout_log_prob=ones, response_mask=ones)
    with pytest.raises(ValueError, match="run rollout_stage again"):
        step_stage(other, stage, log_prob=ones, advantages=ones)


# Contracts of the outputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["old_log_prob", "rollout_log_prob", "response_mask"])
def test_shapes_that_differ_in_the_rollout_stage(wrong: str) -> None:
    """A (B, 1) tensor would silently broadcast."""
    tensors: dict[str, Any] = dict.fromkeys(["old_log_prob", "rollout_log_prob", "response_mask"], torch.ones(2, 3))
    with pytest.raises(ValueError, match=rf"{wrong}.*\(2, 1\)"):
        rollout_stage(STACK, **tensors | {wrong: torch.ones(2, 1)})


@pytest.mark.parametrize("wrong", ["log_prob", "advantages"])
def test_shapes_that_differ_in_the_step_stage(wrong: str) -> None:
    """Advantages of shape (B,) or (B, 1) would broadcast to another matrix."""
    ones = torch.ones(3, 3)
    stage = rollout_stage(STACK, old_log_prob=ones, rollout_log_prob=ones, response_mask=ones)
    for bad in (torch.ones(3), torch.ones(3, 1)):
        with pytest.raises(ValueError, match="one shape"):
            step_stage(STACK, stage, **dict(log_prob=ones, advantages=ones) | {wrong: bad})


@pytest.mark.parametrize(("level", "name"), [("turn", "segment_ids"), ("version", "versions")])
def test_a_level_without_its_ids(level: str, name: str) -> None:
    """The ids of another level do not help."""
    other = {"turn": "versions", "version": "turns"}[level]
    for correction in (spec(m=band(0.9, 1.1, level=level)), spec(TIS | {"level": level, "normalize": True})):
        with pytest.raises(ValueError, match=rf"level={level} needs {name}.*Pass {name}.*level=sequence"):
            first_stage(correction, mu=[[0.0]], old=[[0.0]])
        with pytest.raises(ValueError, match=rf"level={level} needs {name}"):
            first_stage(correction, mu=[[0.0]], old=[[0.0]], **{other: [[0]]})


# Log-probs that are not finite ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_pi_that_is_not_finite_is_counted(bad: float) -> None:
    """The caller stops on it. It is also counted where mu or pi_old has already excluded the token, but never in
    padding.
    """
    pi = [[bad, bad, bad, -1.0]]
    step = run(STACK, mu=[[-1.0, NAN, -1.0, -1.0]], old=[[-1.0] * 4], pi=pi, mask=[[1, 1, 0, 1]])
    assert values(step)["nonfinite/log_prob"] == 2
    assert step.weight.tolist() == [[1.0, 0.0, 0.0, 1.0]]


# SkyRL's order ----------------------------------------------------------------------------------------------


def test_masks_by_advantage_need_advantages() -> None:
    old = torch.zeros(1, 2)
    rows: dict[str, Any] = dict(old_log_prob=old, rollout_log_prob=old, response_mask=torch.ones(1, 2))
    looking = spec(opsm=opsm(0.1))
    with pytest.raises(ValueError, match=r"correction\.masks\.opsm\.when=negative needs advantages.*Pass advantages"):
        step_stage(looking, rollout_stage(looking, **rows), log_prob=old)
    blind = spec(gsm=band(0.9, 1.1))
    assert step_stage(blind, rollout_stage(blind, **rows), log_prob=old).keep.all()


def test_constants_of_another_correction_are_no_constants() -> None:
    rows: dict[str, Any] = dict(
        old_log_prob=torch.zeros(1, 2), rollout_log_prob=torch.zeros(1, 2), response_mask=torch.ones(1, 2)
    )
    for needy in (spec(TIS | {"normalize": True}), spec(m2po=M2PO)):
        with pytest.raises(ValueError, match="Pass the result of batch_constants"):
            rollout_stage(needy, constants=BatchConstants(), **rows)


@pytest.mark.parametrize("name", ["segment_ids", "versions"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_units_are_numbered_by_integers(name: str, dtype: torch.dtype) -> None:
    zeros = torch.zeros(1, 2)
    rows: dict[str, Any] = dict(old_log_prob=zeros, rollout_log_prob=zeros, response_mask=torch.ones(1, 2))
    rows[name] = torch.zeros(1, 2, dtype=dtype)
    with pytest.raises(ValueError, match=f"{name} has dtype {dtype}: expected integers"):
        rollout_stage(spec(TIS), **rows)


def test_a_column_of_another_name_is_refused() -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(TypeError, match="unknown columns turn_ids"):
        rollout_stage(  # type: ignore[call-arg]
            CorrectionSpec(), old_log_prob=ones, rollout_log_prob=ones, response_mask=ones.bool(), turn_ids=ones.long()
        )


# Log-ratios -------------------------------------------------------------------------------------------------


def test_reject_looks_beyond_the_clamp() -> None:
    """A product of e^30 gives a weight of at most e^20, but is outside a bound of e^20."""
    weight = TIS | {"level": "sequence", "kind": "reject", "upper": math.exp(20.0)}
    assert not run(spec(weight), mu=torch.zeros(1, 30), old=torch.ones(1, 30)).keep.any()


# Little or nothing ------------------------------------------------------------------------------------------


def test_rows_without_the_token_dimension_and_ages_of_another_shape() -> None:
    names = ("old_log_prob", "rollout_log_prob", "response_mask")
    with pytest.raises(ValueError, match="one shape"):
        rollout_stage(STACK, **dict.fromkeys(names, torch.ones(3)))
    for shape in ((3,), (2, 2)):
        with pytest.raises(ValueError, match=r"staleness"):
            rollout_stage(STACK, **dict.fromkeys(names, torch.ones(2, 3)), staleness=torch.zeros(shape))
