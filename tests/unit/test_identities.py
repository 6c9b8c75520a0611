"""Identities that hold for every correction, and an independent reading of the formulas in plain Python.

Log-probs are multiples of 1/64 above -4, so that their differences and sums are exact in every dtype and results can
be compared to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from corrections import GSM, TIS, opsm, spec, tensor, values
from hypothesis import given, settings
from hypothesis import strategies as draw
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, StepStage, rollout_stage, step_stage
from recipe.offpolicy.correction.statistics import merge_all, to_host

examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Rows:
    """A batch; every tensor (B, T)."""

    mu: Tensor
    old: Tensor
    pi: Tensor
    mask: Tensor
    advantages: Tensor

    def __getitem__(self, rows: Any) -> Rows:
        return Rows(*(getattr(self, field.name)[rows] for field in fields(self)))

    def to(self, dtype: torch.dtype) -> Rows:
        return replace(self, mu=self.mu.to(dtype), old=self.old.to(dtype), pi=self.pi.to(dtype))


def decide(correction: CorrectionSpec, rows: Rows) -> StepStage:
    stage = rollout_stage(correction, old_log_prob=rows.old, rollout_log_prob=rows.mu, response_mask=rows.mask)
    return step_stage(correction, stage, log_prob=rows.pi, advantages=rows.advantages)


@draw.composite
def batches(draw_one: Any, min_rows: int = 0) -> Rows:
    shape = (draw_one(draw.integers(min_rows, 4)), draw_one(draw.integers(1, 5)))
    size = shape[0] * shape[1]

    def numbers(low: int, high: int) -> Tensor:
        drawn = draw_one(draw.lists(draw.integers(low, high), min_size=size, max_size=size))
        return tensor(drawn).reshape(shape)

    # Small steps between the policies as well as large ones, so that every band has rows on both sides.
    width = draw_one(draw.sampled_from([1, 8, 60]))
    mu = numbers(-190, -65)
    old = (mu + numbers(-width, width)).clamp(-255, 0)
    pi = (old + numbers(-width, width)).clamp(-255, 0)
    return Rows(mu / 64, old / 64, pi / 64, numbers(-1, 1) >= 0, numbers(-2, 2))


# Bands that hold 1, where a ratio of 1 is a no-op.
LOWER, UPPER = (None, 0.5, 0.9, 0.99, 1.0), (None, 1.0, 1.01, 1.1, 2.0)


@draw.composite
def weights(draw_one: Any) -> dict[str, Any] | None:
    level = draw_one(draw.sampled_from(["token", "sequence", None]))
    if level is None:
        return None
    lower, upper = draw_one(draw.sampled_from(LOWER)), draw_one(draw.sampled_from(UPPER))
    kind = "truncate" if lower is None or upper is None else "clip"
    return dict(level=level, kind=kind, lower=lower, upper=upper)


@draw.composite
def masks(draw_one: Any) -> dict[str, Any]:
    mapping = dict(
        ratio=draw_one(draw.sampled_from(["rollout", "full", "ppo"])),
        level="sequence",
        aggregate=draw_one(draw.sampled_from(["geometric", "product"])),
        when=draw_one(draw.sampled_from(["any", "negative", "positive"])),
    )
    if draw_one(draw.booleans()):
        return mapping | {"delta": draw_one(draw.sampled_from([0.0, 1 / 64, 0.125, 0.5]))}
    lower, upper = draw_one(draw.sampled_from(LOWER[1:])), draw_one(draw.sampled_from(UPPER))
    return mapping | {"lower": lower, "upper": upper}


@draw.composite
def corrections(draw_one: Any) -> CorrectionSpec:
    named = dict(zip("abc", draw_one(draw.lists(masks(), max_size=3)), strict=False))
    return spec(draw_one(weights()), **named)


def same(one: StepStage, two: StepStage, *, statistics: bool = True) -> None:
    """Equal to the bit; statistics to the rounding of sums in another order."""
    assert torch.equal(one.keep, two.keep)
    assert torch.equal(one.weight, two.weight)
    if statistics:
        assert values(one) == pytest.approx(values(two), rel=1e-12, abs=1e-12, nan_ok=True)


# The formulas read again, a row and a token at a time -------------------------------------------------------


def clipped(log_value: float, bounds: dict[str, Any]) -> float:
    value = math.exp(min(max(log_value, -20.0), 20.0))
    value = value if bounds["lower"] is None else max(value, bounds["lower"])
    return value if bounds["upper"] is None else min(value, bounds["upper"])


def expected(mapping: dict[str, Any], rows: Rows) -> tuple[list[list[float]], list[list[bool]]]:
    weight: list[list[float]] = []
    keep: list[list[bool]] = []
    columns = (rows.mu, rows.old, rows.pi, rows.advantages, rows.mask)
    for mu, old, pi, advantage, mask in zip(*(column.tolist() for column in columns), strict=True):
        at = [t for t in range(len(mask)) if mask[t]]
        log = {
            "rollout": [old[t] - mu[t] for t in at],
            "ppo": [pi[t] - old[t] for t in at],
            "full": [pi[t] - mu[t] for t in at],
        }
        weight.append([0.0] * len(mask))
        for t in at:
            if (w := mapping["weight"]) is None:
                weight[-1][t] = 1.0
            else:
                weight[-1][t] = clipped(sum(log["rollout"]) if w["level"] == "sequence" else old[t] - mu[t], w)
        kept = True
        mean_advantage = sum(advantage[t] for t in at) / max(len(at), 1)
        for one in mapping["masks"].values():
            looks = {"any": True, "negative": mean_advantage < 0, "positive": mean_advantage > 0}[one["when"]]
            value = sum(log[one["ratio"]])
            if one["aggregate"] == "geometric":
                value /= max(len(at), 1)
            if "delta" in one:
                outside = -value > one["delta"]
            else:
                low = -math.inf if one["lower"] is None else np.float32(math.log(one["lower"]))
                high = math.inf if one["upper"] is None else np.float32(math.log(one["upper"]))
                outside = not low <= np.float32(value) <= high
            kept = kept and not (looks and outside)
        keep.append([kept and bool(mask[t]) for t in range(len(mask))])
    return weight, keep


@settings(examples, max_examples=150)
@given(corrections(), batches())
def test_weight_and_keep_are_the_formulas(correction: CorrectionSpec, rows: Rows) -> None:
    weight, keep = expected(correction.to_mapping(), rows)
    step = decide(correction, rows)
    assert step.keep.tolist() == keep
    assert step.weight.flatten().tolist() == pytest.approx([w for row in weight for w in row], rel=1e-6)


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
    """R4: mu = pi_old = pi gives weight 1 and keeps everything, whatever is configured."""
    step = decide(correction, replace(rows, old=rows.mu, pi=rows.mu))
    assert torch.equal(step.weight, rows.mask.float())
    assert torch.equal(step.keep, rows.mask)


@examples
@given(weights(), draw.lists(masks(), max_size=2), batches())
def test_mu_equal_to_pi_old_is_a_no_op_on_the_rollout_ratio(
    weight: dict[str, Any] | None, some: list[dict[str, Any]], rows: Rows
) -> None:
    """pi may be anywhere: what looks at pi_old / mu alone does not see it."""
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
    """Padding and tool tokens alike: the holes of these masks lie anywhere."""
    names = ("mu", "old", "pi", "advantages")
    filled = {
        name: torch.where(rows.mask, getattr(rows, name), torch.tensor(value))
        for name, value in zip(names, junk, strict=True)
    }
    step, clean = decide(correction, replace(rows, **filled)), decide(correction, rows)
    same(step, clean)
    assert not step.weight[~rows.mask].any()
    assert not step.keep[~rows.mask].any()


@examples
@given(corrections(), batches(), draw.integers(1, 3), draw.booleans())
def test_more_padding_changes_nothing(correction: CorrectionSpec, rows: Rows, columns: int, left: bool) -> None:
    """The same rows in a wider batch, padded on either side; what V1 does at every micro-batch."""
    sides = (columns, 0) if left else (0, columns)

    def pad(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values.float(), sides, value=0.0)

    wide = Rows(*(pad(getattr(rows, field.name)) for field in fields(rows)))
    wide = replace(wide, mask=wide.mask.bool())
    step = decide(correction, wide)
    inner = slice(sides[0], sides[0] + rows.mask.shape[1])
    same(replace(step, weight=step.weight[:, inner], keep=step.keep[:, inner]), decide(correction, rows))
    assert step.weight.count_nonzero() == rows.mask.sum()


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
    counted = {name for name in ours if name.startswith(("nonfinite/", "keep/")) or name.endswith("token_share")}
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
    """Rule 6: weight, keep and every statistic are those of the whole batch; an empty part does not disturb."""
    low, high = sorted((one, two))
    parts = [decide(correction, rows[part]) for part in (slice(0, low), slice(low, high), slice(high, None))]
    whole = decide(correction, rows)
    merged = merge_all(to_host(part.statistics) for part in parts)
    together = StepStage(torch.cat([part.weight for part in parts]), torch.cat([part.keep for part in parts]), merged)
    same(together, whole)


@examples
@given(corrections(), batches(min_rows=1))
def test_parts_of_a_correction_do_not_look_at_each_other(correction: CorrectionSpec, rows: Rows) -> None:
    """keep is the intersection of the masks alone; the weight is that of no mask. So no order can matter."""
    step = decide(correction, rows)
    assert torch.equal(step.weight, decide(CorrectionSpec(weight=correction.weight), rows).weight)
    keep = rows.mask
    for mask in correction.masks:
        keep = keep & decide(CorrectionSpec(masks=(mask,)), rows).keep
    assert torch.equal(step.keep, keep)
    same(decide(replace(correction, masks=correction.masks[::-1]), rows), step)


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
@given(draw.lists(masks(), max_size=3), batches(), draw.integers(2, 5))
def test_tiling_leaves_geometric_masks(some: list[dict[str, Any]], rows: Rows, times: int) -> None:
    """A row repeated has the same geometric mean ratio, so the same decision (R17)."""
    correction = spec(gsm=GSM, **{f"m{i}": mask | {"aggregate": "geometric"} for i, mask in enumerate(some)})
    tiled = Rows(*(getattr(rows, field.name).repeat(1, times) for field in fields(rows)))
    assert torch.equal(decide(correction, tiled).keep, decide(correction, rows).keep.repeat(1, times))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@settings(examples, max_examples=20)
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
    """R22: A >= 0 is never dropped, by the direct form or by either term of the factored one."""
    correction = spec(TIS, full=opsm(delta), mismatch=opsm(delta, "rollout"), staleness=opsm(delta, "ppo"))
    step = decide(correction, replace(rows, advantages=rows.advantages.abs()))
    assert torch.equal(step.keep, rows.mask)


@examples
@given(batches(), draw.sampled_from([1 / 64, 0.125]), draw.sampled_from([1 / 64, 0.125]))
def test_both_budgets_kept_is_their_sum_kept(rows: Rows, mismatch: float, staleness: float) -> None:
    """R23: the two means add up to the direct one, so a row inside both budgets is inside a delta of their sum."""
    factored = decide(spec(a=opsm(mismatch, "rollout"), b=opsm(staleness, "ppo")), rows)
    direct = decide(spec(c=opsm(mismatch + staleness)), rows)
    assert not (factored.keep & ~direct.keep).any()
