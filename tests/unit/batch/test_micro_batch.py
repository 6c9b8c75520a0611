"""A micro-batch owns the data that the engine passes on, and builds the loss's arguments from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from recipe.offpolicy.batch import micro_batch as mb
from recipe.offpolicy.batch.padding import Layout, pad_column
from recipe.offpolicy.batch.plan import (
    PLAN,
    SCALE,
    BatchSplit,
    SharedPlan,
    build_row_columns,
    compute_constants,
    regroup_without_rejected,
)
from recipe.offpolicy.batch.weight_versions import CHUNKS, RowVersions
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.correction_parts import PenaltySpec
from recipe.offpolicy.worker.terms import compute_penalty
from tests.support.corrections import TIS, band, spec
from tests.support.packed import packed


def read() -> mb.MicroBatch:
    """Read rows of two tokens and of one token, padded, as the legacy actors pass them."""
    mask = torch.tensor([[1, 1], [1, 0]])
    column = torch.zeros(2, 2)
    columns = dict.fromkeys(("old_log_probs", "advantages", mb.ROLLOUT_LOG_PROBS), column)
    data = TensorDict({"responses": mask, "response_mask": mask, **columns}, batch_size=2)
    return mb.read({"log_probs": torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)}, data)


RATIOS = torch.tensor([[1.5, 4.0], [1.0, 9.0]]).log()
"""Log pi_old / mu with mu = 1: below the cap of 2, above it, and equal; the last token is padding."""


def test_a_weight_by_version_is_that_of_each_chunk() -> None:
    """Rows of two versions are compared with a float64 loop over the chunks; one row whose chunks do not fit is one
    unit.
    """
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]])
    mu, old = (-1.0 - torch.rand(3, 6, generator=generator) for _ in range(2))
    turns = [[[(3, 1), (4, 2)], [(4, 1), (6, 1)]], [[(5, 4)]], [[(3, 2)]]]
    fields = [{"min_global_steps": 3, "max_global_steps": 6, CHUNKS: row} for row in turns]
    columns = {"rollout_log_probs": mu, "old_log_probs": old, "advantages": torch.ones(3, 6)}
    data = TensorDict(
        {"responses": mask, "response_mask": mask, "extra_fields": NonTensorStack(*fields), **columns}, batch_size=3
    )
    batch = mb.read({"log_probs": old}, data)
    weight = mb.decide(spec(TIS | {"level": "version", "upper": 100.0}), batch).weight
    chunks = [(0, [0]), (0, [1, 2, 4]), (0, [5]), (1, [0, 1, 2, 3]), (2, [0, 1, 2, 3, 4])]
    for row, places in chunks:
        expected = (old[row, places].double() - mu[row, places].double()).sum().exp()
        assert weight[row, places].tolist() == pytest.approx([float(expected)] * len(places), rel=1e-6)
    assert mb.count_unknown_versions(batch)["staleness/unknown_by_token"].value() == 1.0


def test_the_factor_holds_weight_keep_and_the_kept_denominator() -> None:
    batch = replace(read(), old_log_prob=RATIOS)
    mask = band(0.5, 3.0, level="token", aggregate="product")
    original, kept = spec(TIS, any=mask), replace(spec(TIS, any=mask), denominator="kept")
    step = mb.decide(original, batch)
    assert mb.compute_factor(original, batch, step).tolist() == [pytest.approx([1.5, 0.0]), [1.0, 0.0]]
    scaled = replace(batch, scale=torch.tensor([2.0, 0.5], dtype=torch.float64))
    assert mb.compute_factor(kept, scaled, step).tolist() == [pytest.approx([3.0, 0.0]), [0.5, 0.0]]
    with pytest.raises(KeyError, match=f"{SCALE} is not in the micro-batch"):
        mb.compute_factor(kept, batch, step)


@pytest.mark.parametrize(("ratio", "first"), [("full", 36.0), ("ppo", 16.0)])
def test_a_penalty_squares_the_distance_from_mu_or_pi_old(ratio: str, first: float) -> None:
    """log pi = -1, log pi_old = -5, log mu = -7 on the first token."""
    batch = replace(read(), old_log_prob=torch.full((2, 2), -5.0), rollout_log_prob=torch.full((2, 2), -7.0))
    penalty = PenaltySpec(ratio, 0.1)  # type: ignore[arg-type]
    correction = CorrectionSpec(penalty=penalty)
    assert compute_penalty(penalty, batch, correction)[0, 0].item() == first
    excluded = replace(correction, nonfinite="excluded")
    scaled = replace(batch, scale=torch.tensor([2.0, 0.5], dtype=torch.float64))
    assert compute_penalty(penalty, scaled, excluded)[0, 0].item() == 2 * first
    with pytest.raises(KeyError, match="nonfinite=excluded needs this column"):
        compute_penalty(penalty, batch, excluded)


@pytest.mark.parametrize(
    ("source", "first"),
    [("recompute", -5.0), ("bypass", -7.0), ("same_engine", -7.0), ("reuse", -1.0), ("loglinear", -4.0)],
)
def test_pi_old_is_what_the_correction_takes_for_it(source: str, first: float) -> None:
    batch = replace(read(), old_log_prob=torch.full((2, 2), -5.0), rollout_log_prob=torch.full((2, 2), -7.0))
    correction = CorrectionSpec(proximal=source, alpha=0.5)  # type: ignore[arg-type]
    found = mb.choose_pi_old(correction, batch)
    assert found[0, 0].item() == first
    assert not found.requires_grad


def test_staleness_counts_from_the_weights_of_the_steps_start() -> None:
    versions = RowVersions(torch.tensor([4, 2]), torch.tensor([4, 3]))
    batch = replace(read(), versions=versions, plan=SharedPlan(5))
    found = mb.compute_staleness(batch)
    # Step 5 begins with version 4; a row of two versions is as old as its oldest.
    assert found is not None
    assert found.tolist() == [0, 2]
    assert mb.compute_staleness(replace(batch, plan=None)) is None
    assert mb.compute_staleness(replace(batch, versions=None)) is None


def nested(*rows: list[float]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def test_log_probs_of_the_responses_are_cut_out_of_prompts_and_responses() -> None:
    # A prompt of one token and of two; at each token stands what belongs to the one after it.
    data = TensorDict({"prompts": nested([7], [7, 7]), "responses": nested([8, 9], [8])}, batch_size=2)
    output = {"log_probs": nested([-1.0, -2.0, 0.0], [5.0, -3.0, 0.0])}
    assert mb.pad_log_probs(output, data).tolist() == [[-1.0, -2.0], [-3.0, 0.0]]
    assert mb.pad_log_probs(output, data, Layout.of(data)).tolist() == [[-1.0, -2.0], [-3.0, 0.0]]
    already = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    assert mb.pad_log_probs({"log_probs": already}, data) is already


def test_bounds_are_those_of_the_parts_that_move() -> None:
    batch = replace(read(), plan=SharedPlan(1, bounds={"gsm": {"lower": 0.9, "upper": 1.1}}))
    assert mb.read_bounds(batch, ["gsm"])["gsm"]["upper"] == 1.1
    with pytest.raises(KeyError, match=r"instead of bounds for \['other'\]"):
        mb.read_bounds(batch, ["other"])
    with pytest.raises(KeyError, match=f"{PLAN} is not in the micro-batch"):
        mb.read_bounds(read(), ["gsm"])


# Age --------------------------------------------------------------------------------------------------------


def aged(*fields: dict[str, Any], step: int | None = 7, columns: dict[str, Any] | None = None) -> Any:
    """Rows of two turns, of a turn and a token, and of one turn, nested as verl does; every ratio pi_old / mu
    is e^0.1.
    """
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 0, 0]])
    mu = torch.full((3, 4), -1.0)
    rows = {"responses": mask, "response_mask": mask, "rollout_log_probs": mu, "old_log_probs": mu + 0.1}
    rows |= {"advantages": torch.ones(3, 4), "extra_fields": NonTensorStack(*fields), **(columns or {})}
    data = TensorDict(rows, batch_size=3)
    if step is not None:
        data[PLAN] = NonTensorData(SharedPlan(step), batch_size=[3])
    return data


def noted(oldest: int, newest: int, turns: Any = None) -> dict[str, Any]:
    span = {"min_global_steps": oldest, "max_global_steps": newest}
    return span if turns is None else span | {CHUNKS: turns}


CHUNKED = (noted(3, 6, [[(3, 1), (4, 1)], [(6, 1)]]), noted(5, 5, [[(5, 3)]]), noted(2, 4, [[(2, 9)], [(4, 1)]]))
"""In step 7: ages 3, 2 and 0; 1; and a row whose chunks do not fit, which is as old as its first token: 4."""
STALE: dict[str, Any] = {"aggregate": "staleness", "level": "token", "upper": 2}


def decided(correction: CorrectionSpec, data: TensorDict) -> Any:
    return mb.decide(correction, mb.read({"log_probs": data["old_log_probs"]}, data))


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ("token", [[False, True, False, True], [True] * 3 + [False], [False] * 4]),
        ("turn", [[False, False, False, True], [True] * 3 + [False], [False] * 4]),
        ("sequence", [[False] * 4, [True] * 3 + [False], [False] * 4]),
    ],
)
def test_tokens_that_are_too_old_are_masked(level: str, kept: list[list[bool]]) -> None:
    step = decided(spec(stale=STALE | {"level": level}), aged(*CHUNKED))
    assert step.keep.tolist() == kept


MIXED = (noted(3, 6), noted(5, 5), noted(4, 4))


@pytest.mark.parametrize("level", ["token", "turn"])
def test_ages_by_row_do_not_tell_tokens_of_several_versions_apart(level: str) -> None:
    said = rf"correction.masks.stale.level={level}: 1 sequences were sampled by several versions"
    with pytest.raises(ValueError, match=f"{said}.*Set correction.masks.stale.level=sequence"):
        decided(spec(stale=STALE | {"level": level}), aged(*MIXED))
    said = r"weight.by_staleness=\[1.0,2.0\]: 1 sequences.*level=sequence.*or correction.weight.by_staleness=null"
    with pytest.raises(ValueError, match=said):
        decided(spec(TIS | {"level": level, "by_staleness": [1, 2]}), aged(*MIXED))
    single = (noted(3, 3), *MIXED[1:])
    assert decided(spec(stale=STALE | {"level": level}), aged(*single)).keep.any(-1).tolist() == [False, True, True]


def test_without_versions_or_a_step_there_is_no_age() -> None:
    for data, lacking in (
        (aged({}, {}, {}), "the version of the weights"),
        (aged(*CHUNKED, step=None), "the trainer's step"),
    ):
        said = f"correction.masks.stale depends on the age of the weights, but the batch does not contain {lacking}"
        with pytest.raises(ValueError, match=said):
            decided(spec(stale=STALE), data)
        batch = mb.read({"log_probs": data["old_log_probs"]}, data)
        with pytest.raises(ValueError, match=lacking):
            mb.decide_with_shadows(spec(TIS), {"stale": spec(stale=STALE)}, batch)


def test_the_plan_knows_ages_of_nested_rows() -> None:
    """The mean of weights capped by age; rows that are too old leave their group if this is configured."""
    data = aged(*CHUNKED)
    nested = {name: packed(data[name], [4, 3, 1]) for name in ("response_mask", "old_log_probs", "rollout_log_probs")}
    rows = TensorDict({**nested, "extra_fields": NonTensorStack(*CHUNKED)}, batch_size=3)
    capped = spec(TIS | {"upper": 1.01, "by_staleness": [1, 2, 4], "normalize": True})
    mean = compute_constants(capped, rows, 7).weight_mean
    assert mean == pytest.approx((3 * 1.01**4 + 3 * 1.01**2 + 1.01) / 7, rel=1e-6)
    by_row = replace(spec(stale=STALE | {"level": "sequence"}), baseline="exclude")
    assert regroup_without_rejected(by_row, rows, ["a", "a", "a"], 7).uids == ["a/rejected-0", "a", "a/rejected-2"]
    columns = build_row_columns(replace(spec(stale=STALE), denominator="kept"), rows, BatchSplit(1, 3, "token-mean"), 7)
    assert columns[SCALE].tolist() == pytest.approx([7 / 5] * 3)
    with pytest.raises(ValueError, match="the trainer's step"):
        compute_constants(capped, rows)


def test_a_column_of_other_length_is_refused() -> None:
    data = TensorDict({"prompts": nested([7], [7, 7]), "responses": nested([8, 9], [8])}, batch_size=2)
    with pytest.raises(ValueError, match="advantages in the micro-batch has 4 tokens, but the responses have 3"):
        pad_column(nested([1.0, 2.0], [3.0, 4.0]), Layout.of(data), "advantages")
