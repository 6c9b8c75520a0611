"""Identities that hold for every correction, on any batch.

Log-probs are multiples of 1/64 above -4, so that their differences and sums are exact in every dtype and results can
be compared to the bit.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, StepStage, WeightSpec
from recipe.offpolicy.correction.statistics import merge_all
from tests.support.corrections import GSM, TIS, on_host, opsm, spec, values
from tests.support.drawn import Rows, batches, constants_of, corrections, decide, examples, masks, weights
from tests.support.examples import at_most

MEANS = (
    "geometric",
    "any",
    "k1_mean",
    "k1_max",
    "k2_mean",
    "k2_max",
    "k3_max",
    "tv_max",
    "binary_tv",
    "binary_tv_mean",
    "binary_kl",
    "binary_kl_forward",
    "binary_kl_forward_mean",
)


def same(one: StepStage, two: StepStage, *, statistics: bool = True, besides: str = "") -> None:
    """Keep to the bit; weights to the bit, up to the rounding of the mean that normalised ones are divided by.

    Statistics too, ``besides`` one.
    """
    assert torch.equal(one.keep, two.keep)
    assert torch.allclose(one.weight, two.weight, rtol=2e-7, atol=0.0)
    if statistics:
        expected = values(two) | {key: value for key, value in values(one).items() if key == besides}
        assert values(one) == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)


def test_the_examples_reach_both_answers() -> None:
    """The identities below would be empty if every example kept, or dropped, everything."""
    seen = set()

    @examples
    @given(corrections(), batches(min_rows=1))
    def look(correction: CorrectionSpec, rows: Rows) -> None:
        step = decide(correction, rows)
        dropped = rows.mask & ~step.keep
        seen.update({("kept", bool(step.keep.any())), ("dropped", bool(dropped.any()))})
        seen.add(("weighed", bool((step.weight[rows.mask] != 1).any())))

    look()
    assert seen == {(what, answer) for what in ("kept", "dropped", "weighed") for answer in (True, False)}


# No-ops -----------------------------------------------------------------------------------------------------


@examples
@given(corrections(), batches())
def test_agreement_is_an_exact_no_op(correction: CorrectionSpec, rows: Rows) -> None:
    """mu = pi_old = pi gives weight 1 and keeps everything, whatever is configured."""
    step = decide(correction, replace(rows, old=rows.mu, pi=rows.mu))
    assert torch.equal(step.weight, rows.mask.float())
    assert torch.equal(step.keep, rows.mask)


@examples
@given(weights(), draw.lists(masks(), max_size=2), batches())
def test_mu_equal_to_pi_old_is_a_no_op_on_the_rollout_ratio(
    weight: dict[str, Any] | None, some: list[dict[str, Any]], rows: Rows
) -> None:
    """pi may be anywhere: what looks at pi_old / mu alone does not see it."""
    weight = weight and weight | {"ratio": "rollout"}
    correction = spec(weight, **{f"m{i}": mask | {"ratio": "rollout"} for i, mask in enumerate(some)})
    step = decide(correction, replace(rows, old=rows.mu))
    assert torch.equal(step.weight, rows.mask.float())
    assert torch.equal(step.keep, rows.mask)


@examples
@given(
    corrections(),
    batches(),
    draw.lists(draw.sampled_from([math.nan, math.inf, -math.inf, 1e30]), min_size=4, max_size=4),
)
def test_what_is_off_the_mask_is_never_read(correction: CorrectionSpec, rows: Rows, junk: list[float]) -> None:
    """Padding and tool tokens alike, their ids too: the holes of these masks lie anywhere."""
    names = ("mu", "old", "pi", "advantages")
    filled = {
        name: torch.where(rows.mask, getattr(rows, name), torch.tensor(value))
        for name, value in zip(names, junk, strict=True)
    }
    ids = {name: torch.where(rows.mask, getattr(rows, name), 2**40) for name in ("turns", "versions")}
    step, clean = decide(correction, replace(rows, **filled, **ids)), decide(correction, rows)
    same(step, clean)
    assert not step.weight[~rows.mask].any()
    assert not step.keep[~rows.mask].any()


@examples
@given(corrections(), batches(), draw.integers(1, 3), draw.booleans())
def test_more_padding_changes_nothing(correction: CorrectionSpec, rows: Rows, columns: int, left: bool) -> None:
    """The same rows in a wider batch, padded on either side; what V1 does at every micro-batch."""
    sides = (columns, 0) if left else (0, columns)

    def pad(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, sides, value=0)

    wide = Rows(*(pad(getattr(rows, field.name)) for field in fields(rows)))
    step = decide(correction, wide)
    inner = slice(sides[0], sides[0] + rows.mask.shape[1])
    same(replace(step, weight=step.weight[:, inner], keep=step.keep[:, inner]), decide(correction, rows))
    outside = torch.ones_like(wide.mask)
    outside[:, inner] = False
    assert not step.weight[outside].any()
    assert not step.keep[outside].any()


@examples
@given(
    corrections(),
    batches(),
    draw.sampled_from(["mu", "old"]),
    draw.sampled_from([math.nan, math.inf, -math.inf]),
    draw.data(),
)
def test_a_token_without_mu_or_pi_old_is_as_if_masked(
    correction: CorrectionSpec, rows: Rows, policy: str, bad: float, data: Any
) -> None:
    size = rows.mask.numel()
    holes = torch.tensor(data.draw(draw.lists(draw.booleans(), min_size=size, max_size=size)), dtype=torch.bool)
    holes = holes.reshape(rows.mask.shape)
    broken = torch.where(holes, torch.tensor(bad), getattr(rows, policy))
    step, masked = (
        decide(correction, replace(rows, **{policy: broken})),
        decide(correction, replace(rows, mask=rows.mask & ~holes)),
    )
    same(step, masked, statistics=False)
    ours, theirs = values(step), values(masked)
    # What is counted of the response mask, as ages are, and turns, which are its runs.
    counted = {
        name
        for name in ours
        if name.startswith(("nonfinite/", "keep/", "turn/", "length/", "staleness/m"))
        or name.endswith(("token_share", "masked"))
    }
    assert {n: v for n, v in ours.items() if n not in counted} == pytest.approx(
        {n: v for n, v in theirs.items() if n not in counted}, nan_ok=True
    )
    count = {"mu": "nonfinite/rollout_log_prob", "old": "nonfinite/old_log_prob"}
    assert ours[count[policy]] == (holes & rows.mask).sum()


# Rows are independent ---------------------------------------------------------------------------------------


@examples
@given(corrections(), batches(min_rows=1), draw.randoms(use_true_random=False))
def test_rows_in_another_order(correction: CorrectionSpec, rows: Rows, random: Any) -> None:
    order = list(range(len(rows.mu)))
    random.shuffle(order)
    step, moved = decide(correction, rows), decide(correction, rows[order])
    same(moved, replace(step, weight=step.weight[order], keep=step.keep[order]))


@examples
@given(corrections(), batches(min_rows=1), draw.integers(0, 4), draw.integers(0, 4))
def test_micro_batches_add_up_to_the_whole(correction: CorrectionSpec, rows: Rows, one: int, two: int) -> None:
    """With the batch's constants weight, keep and every statistic are those of the whole; an empty part is no harm."""
    low, high = sorted((one, two))
    constants = constants_of(correction, rows)
    parts = [decide(correction, rows[part], constants) for part in (slice(0, low), slice(low, high), slice(high, None))]
    whole = decide(correction, rows)
    merged = merge_all(on_host(part.statistics) for part in parts)
    together = replace(
        whole,
        weight=torch.cat([part.weight for part in parts]),
        keep=torch.cat([part.keep for part in parts]),
        statistics=merged,
    )
    same(together, whole)
    assert torch.equal(together.weight, whole.weight)


@examples
@given(corrections(), batches(min_rows=1))
def test_parts_of_a_correction_do_not_look_at_each_other(correction: CorrectionSpec, rows: Rows) -> None:
    """keep is the intersection of what each part keeps; the weight is that of no mask. So no order can matter."""
    step = decide(correction, rows)
    alone = decide(CorrectionSpec(weight=correction.weight, weights=correction.weights), rows)
    assert torch.equal(step.weight, alone.weight)
    keep = alone.keep
    for name, mask in correction.masks:
        one = decide(CorrectionSpec(masks=((name, mask),)), rows)
        keep = keep & one.keep
        assert torch.equal(step.rejected[f"masks.{name}"] & rows.mask, one.rejected[f"masks.{name}"] & rows.mask)
    assert torch.equal(step.keep, keep)
    same(decide(replace(correction, masks=correction.masks[::-1]), rows), step)


@examples
@given(corrections(), batches(min_rows=1))
def test_keep_is_what_nothing_rejects(correction: CorrectionSpec, rows: Rows) -> None:
    step, keep = decide(correction, rows), rows.mask
    for drop in step.rejected.values():
        keep = keep & ~drop
    assert torch.equal(step.keep, keep)


@examples
@given(corrections(), batches(min_rows=1))
def test_nothing_carries_a_gradient(correction: CorrectionSpec, rows: Rows) -> None:
    leaves = {name: getattr(rows, name).clone().requires_grad_() for name in ("mu", "old", "pi", "advantages")}
    step = decide(correction, replace(rows, **leaves))
    parts = [torch.as_tensor(part) for statistic in step.statistics.values() for part in statistic.parts]
    assert not any(tensor.requires_grad for tensor in [step.weight, *step.rejected.values(), *parts])


# Levels -----------------------------------------------------------------------------------------------------


def by_level(correction: CorrectionSpec, level: str) -> CorrectionSpec:
    """The same correction with all that is decided by sequence decided by ``level``."""

    def moved(weight: WeightSpec) -> WeightSpec:
        return replace(weight, level=level) if weight.level == "sequence" else weight  # type: ignore[arg-type]

    weight = None if correction.weight is None else moved(correction.weight)
    weights = tuple((name, moved(each)) for name, each in correction.weights)
    decided = tuple(
        (name, replace(mask, level=level) if mask.level == "sequence" else mask)  # type: ignore[arg-type]
        for name, mask in correction.masks
    )
    return replace(correction, weight=weight, weights=weights, masks=decided)


@examples
@given(corrections(), batches(min_rows=1), draw.sampled_from(["turn", "version"]), draw.integers(-3, 3))
def test_one_turn_or_version_is_the_sequence(correction: CorrectionSpec, rows: Rows, level: str, name: int) -> None:
    one = torch.full_like(rows.turns, name)
    rows = replace(rows, turns=one, versions=one)
    step, by_unit = decide(correction, rows), decide(by_level(correction, level), rows)
    same(by_unit, step)


@examples
@given(corrections(), batches(min_rows=1), draw.sampled_from(["token", "turn", "version"]))
def test_every_level_is_one_for_a_single_token(correction: CorrectionSpec, rows: Rows, level: str) -> None:
    rows = Rows(*(getattr(rows, field.name)[:, :1] for field in fields(rows)))
    same(decide(by_level(correction, level), rows), decide(correction, rows))


@examples
@given(corrections(), batches(min_rows=1), draw.sampled_from(["turn", "version"]))
def test_a_unit_a_token_is_the_token_level(correction: CorrectionSpec, rows: Rows, level: str) -> None:
    each = torch.arange(rows.mask.shape[1]).expand_as(rows.turns)
    rows = replace(rows, turns=each, versions=each)
    by_unit, by_token = decide(by_level(correction, level), rows), decide(by_level(correction, "token"), rows)
    same(by_unit, by_token, besides="keep/token_mask_ratio")  # counts what masks of level token reject


@examples
@given(
    corrections(), batches(min_rows=1), draw.lists(draw.integers(-(2**62), 2**62), min_size=3, max_size=3, unique=True)
)
def test_what_turns_and_versions_are_called_does_not_matter(
    correction: CorrectionSpec, rows: Rows, names: list[int]
) -> None:
    renamed = torch.tensor(names)
    step = decide(correction, replace(rows, turns=renamed[rows.turns], versions=renamed[rows.versions]))
    same(step, decide(correction, rows), statistics=False)


@examples
@given(corrections(), batches(min_rows=1), draw.sampled_from(["turn", "version"]))
def test_turns_decide_as_rows_of_their_own(correction: CorrectionSpec, rows: Rows, level: str) -> None:
    """Each turn of a row moved to a row of its own and decided by sequence; advantages taken by token, for a row's
    mean would be the turn's."""
    whole: dict[str, Any] = dict(level="sequence", by_position=None)
    by_sequence = replace(
        correction,
        masks=tuple(
            (name, replace(m, sign="token", **whole) if m.aggregate != "second_moment" else m)
            for name, m in correction.masks
        ),
        weight=correction.weight and replace(correction.weight, aggregate="product", **whole),
        weights=tuple((name, replace(w, sign="token", aggregate="product", **whole)) for name, w in correction.weights),
    )
    by_unit, ids = by_level(by_sequence, level), rows.turns if level == "turn" else rows.versions
    found = decide(by_unit, rows)
    count = len(rows.mu)
    spread = Rows(*(getattr(rows, field.name).repeat(3, 1) for field in fields(rows)))
    owner = torch.arange(3).repeat_interleave(count)[:, None]
    alone = decide(by_sequence, replace(spread, mask=spread.mask & (ids.repeat(3, 1) == owner)))
    assert torch.equal(found.keep, alone.keep.reshape(3, count, -1).any(0))
    assert torch.allclose(found.weight, alone.weight.reshape(3, count, -1).sum(0), rtol=2e-7, atol=0.0)


# Ratios, lengths, dtypes ------------------------------------------------------------------------------------


@examples
@given(batches(min_rows=1), draw.integers(0, 2**31))
def test_full_is_rollout_times_ppo(rows: Rows, seed: int) -> None:
    """R3, on log-probs as rough as real ones: log(pi/mu) = log(pi_old/mu) + log(pi/pi_old) to 1e-6 a token."""
    noise = 0.01 * torch.randn((2, *rows.mu.shape), generator=torch.Generator().manual_seed(seed))
    rough = replace(rows, old=rows.old + noise[0], pi=rows.pi + noise[1])
    for t in range(rows.mu.shape[1]):
        for b in range(len(rows.mu)):
            one = rough[slice(b, b + 1)]
            one = Rows(*(getattr(one, field.name)[:, t : t + 1] for field in fields(one)))
            got = values(decide(spec(), one))
            if one.mask.item():
                direct = math.exp(one.pi.double().item() - one.mu.double().item())
                assert got["full_ratio/mean"] == pytest.approx(direct, rel=1e-6)
                product = got["rollout_ratio/mean"] * got["ppo_ratio/mean"]
                assert got["full_ratio/mean"] == pytest.approx(product, rel=1e-6)


@examples
@given(draw.lists(masks(MEANS), max_size=3), batches(), draw.integers(2, 5))
def test_tiling_leaves_what_is_a_mean_or_an_extreme(some: list[dict[str, Any]], rows: Rows, times: int) -> None:
    """A row repeated has the same means and extremes, so the same decision; sums grow with its length."""
    some = [mask | {"level": "sequence", "by_position": None} if mask["level"] == "prefix" else mask for mask in some]
    correction = spec(gsm=GSM, **{f"m{i}": mask for i, mask in enumerate(some)})
    tiled = Rows(*(getattr(rows, field.name).repeat(1, times) for field in fields(rows)))
    assert torch.equal(decide(correction, tiled).keep, decide(correction, rows).keep.repeat(1, times))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@settings(examples, max_examples=at_most(20))
@given(correction=corrections(), rows=batches())
def test_the_dtype_does_not_matter(dtype: torch.dtype, correction: CorrectionSpec, rows: Rows) -> None:
    """These log-probs are exact in each, so anything computed in a short dtype would show."""
    assert torch.equal(rows.mu.to(dtype).float(), rows.mu)
    step, single = decide(correction, rows.to(dtype)), decide(correction, rows)
    assert torch.equal(step.keep, single.keep)
    assert step.weight.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert torch.allclose(step.weight.float(), single.weight, rtol=1e-6, atol=0.0)


@examples
@given(corrections(), batches(), draw.sampled_from([2.0**-20, 3.0, 1e6]))
def test_only_the_sign_of_an_advantage_counts(correction: CorrectionSpec, rows: Rows, scale: float) -> None:
    same(decide(correction, replace(rows, advantages=scale * rows.advantages)), decide(correction, rows))


@examples
@given(draw.sampled_from([0.0, 1 / 64, 0.125]), batches())
def test_rows_that_did_not_lose_survive_opsm(delta: float, rows: Rows) -> None:
    """A >= 0 is never dropped, by the direct form or by either term of the factored one."""
    correction = spec(TIS, full=opsm(delta), mismatch=opsm(delta, "rollout"), staleness=opsm(delta, "ppo"))
    step = decide(correction, replace(rows, advantages=rows.advantages.abs()))
    assert torch.equal(step.keep, rows.mask)


@examples
@given(batches(), draw.sampled_from([1 / 64, 0.125]), draw.sampled_from([1 / 64, 0.125]))
def test_both_budgets_kept_is_their_sum_kept(rows: Rows, mismatch: float, staleness: float) -> None:
    """The two means add up to the direct one, so a row inside both budgets is inside a delta of their sum."""
    factored = decide(spec(a=opsm(mismatch, "rollout"), b=opsm(staleness, "ppo")), rows)
    direct = decide(spec(c=opsm(mismatch + staleness)), rows)
    assert not (factored.keep & ~direct.keep).any()
