"""What is measured of a correction, as statistics that add up over micro-batches and ranks.

``catalogue`` says what each one means. Everything is summed in float64, over the original response mask.

Passes over (B, T) are what costs: each log-ratio is read as a double and exponentiated once, counts by length,
sign and staleness come from sums by row, and a boolean mask is used as a number, for torch selects by booleans at a
fraction of the speed of its arithmetic on CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from . import statistics as st
from .catalogue import BUCKETS, SIGNS, STALENESS, TURNS
from .ratios import excess, exp_clamped
from .statistics import Moments, Reduction, Statistic
from .units import Units
from .weight_spec import WeightSpec

Measure = Literal["all", "decisions", "nothing"]
"""All statistics, those of weights and of what is kept, or none."""

_GEOMETRIC: Final = (math.log(0.99), math.log(1.01))
_PRODUCT: Final = (math.log(0.5), math.log(2.0))


@dataclass(frozen=True)
class Sample:
    """The tokens and rows that statistics are taken over.

    Attributes:
        mask, valid: (B, T) bool, response tokens, and those of them whose mu and pi_old are finite.
        valid_number: (B, T) float64, ``valid`` as 0 and 1.
        padding: (B, T) in the dtype of the log-ratio: 0 on valid tokens, huge elsewhere, so that extremes pass by.
        tokens, length: (B,) float64, response tokens and valid tokens.
        groups: group of rows -> (B,) float64 of 0 and 1; "" holds all rows with a response token. A row of no valid
            token has no length.
        turns: group of tokens -> (B, T) float64 of 0 and 1, within ``mask``; empty without segment ids.
        staleness: (B,) float64 or None.
    """

    mask: Tensor
    valid: Tensor
    valid_number: Tensor
    padding: Tensor
    tokens: Tensor
    length: Tensor
    groups: dict[str, Tensor]
    turns: dict[str, Tensor]
    staleness: Tensor | None


@dataclass(frozen=True)
class Mismatch:
    """What the rollout stage hands on to statistics of the step stage.

    Attributes:
        ratio: of pi_old / mu by token.
        old_total: sum of log pi_old over valid tokens.
    """

    ratio: Moments
    old_total: Tensor


@dataclass(frozen=True)
class Weighed:
    """A weight on its way from a log-ratio to what is applied.

    Attributes:
        by_unit: (B, U) float64, log of the raw weight of each of ``units``.
        raw, weight: (B, T), before and after bounds and normalisation, 0 off valid tokens.
        drop: (B, T) bool, what a weight of kind reject drops; without meaning off valid tokens.
    """

    units: Units
    by_unit: Tensor
    raw: Tensor
    weight: Tensor
    drop: Tensor


@torch.no_grad()
def sample(
    mask: Tensor, valid: Tensor, dtype: torch.dtype, segment_ids: Tensor | None, staleness: Tensor | None
) -> Sample:
    """Sort tokens and rows into the groups that statistics are given by; see ``stages.rollout_stage``."""
    valid_number = _number(valid)
    tokens, length = _row_count(mask), _row_count(valid)
    rows = (tokens > 0).double()
    groups = {"": rows}
    shorter = torch.zeros_like(rows)
    for name, most in BUCKETS.items():
        up_to = (length > 0).double() if most is None else ((length > 0) & (length <= most)).double()
        groups[f"length/{name}"], shorter = up_to - shorter, up_to
    age = None
    if staleness is not None:
        age = staleness.detach().double()
        for index, name in enumerate(STALENESS):
            groups[f"staleness/{name}"] = (age >= index if name.startswith("ge") else age == index).double()
    turns = {}
    if segment_ids is not None:
        unseen = torch.iinfo(segment_ids.dtype).max
        ids = torch.where(mask, segment_ids, unseen)
        first = mask & (ids == ids.amin(-1, keepdim=True)) if ids.numel() else mask
        turns = dict(zip(TURNS, (_number(first), _number(mask & ~first)), strict=True))
    return Sample(
        mask=mask,
        valid=valid,
        valid_number=valid_number,
        padding=(1 - valid_number).to(dtype) * torch.finfo(dtype).max,
        tokens=tokens,
        length=length,
        groups=groups,
        turns=turns,
        staleness=age,
    )


@torch.no_grad()
def of_rollout(
    sample: Sample, log_rho: Tensor, old_log_prob: Tensor, rollout_log_prob: Tensor
) -> tuple[dict[str, Statistic], Mismatch]:
    """The mismatch pi_old / mu, each tensor (B, T)."""
    value = log_rho.double()
    above = excess(value)
    by_row = value.sum(-1)
    k3_by_row = above.sum(-1) - by_row
    count, log_total = sample.length.sum(), by_row.sum()
    ratio = _moments(sample, above, log_rho, exp_clamped)
    old_total = (old_log_prob.nan_to_num(0.0, 0.0, 0.0) * sample.valid_number).sum()
    statistics = ratio.statistics("rollout_ratio")
    statistics |= _of_sequences(by_row, sample.length).statistics("rollout_ratio_sequence")
    statistics |= {
        "log_prob_difference/mean": st.mean(log_total, count),
        "log_prob_difference/std": Statistic(Reduction.STD, (log_total, _dot(value, value), count)),
        "log_prob_difference/abs_mean": st.mean(value.abs().sum(), count),
        # KL(mu || pi_old) from mu's own samples (Schulman 2020).
        "kl/k1": st.mean(-log_total, count),
        "kl/k3": st.mean(k3_by_row.sum(), count),
        "perplexity/rollout": Statistic(Reduction.PERPLEXITY, (old_total - log_total, count)),
        "perplexity/old": Statistic(Reduction.PERPLEXITY, (old_total, count)),
        "nonfinite/rollout_log_prob": st.total(_not_finite(rollout_log_prob, sample.mask)),
        "nonfinite/old_log_prob": st.total(_not_finite(old_log_prob, sample.mask)),
    }
    columns = {
        "rows": sample.groups[""],
        "tokens": sample.length,
        "k3": k3_by_row,
        "geometric": _inside(by_row / sample.length.clamp(min=1), _GEOMETRIC).double(),
        "product": _inside(by_row, _PRODUCT).double(),
    }
    for name, sums in _by_group(sample.groups, columns).items():
        if name.startswith("length/"):
            statistics[f"{name}/sequences"] = st.total(sums["rows"])
            statistics[f"{name}/geometric_keep_share"] = st.mean(sums["geometric"], sums["rows"])
            statistics[f"{name}/product_keep_share"] = st.mean(sums["product"], sums["rows"])
        elif name.startswith("staleness/"):
            statistics[f"{name}/token_count"] = st.total(sums["tokens"])
            statistics[f"{name}/kl_k3"] = st.mean(sums["k3"], sums["tokens"])
    squared = above.square()
    for name, turn in sample.turns.items():
        turn_count, turn_excess = _dot(turn, sample.valid_number), _dot(turn, above)
        about_1 = (turn_excess, _dot(turn, squared), turn_count)
        statistics[f"turn/{name}/token_count"] = st.total(turn_count)
        statistics[f"turn/{name}/kl_k3"] = st.mean(turn_excess - _dot(turn, value), turn_count)
        statistics[f"turn/{name}/rollout_ratio/mean"] = st.mean(turn_excess + turn_count, turn_count)
        statistics[f"turn/{name}/rollout_ratio/std"] = Statistic(Reduction.STD, about_1)
    if sample.staleness is not None:
        rows = sample.groups[""]
        statistics["staleness/mean"] = st.mean(_dot(rows, sample.staleness), rows.sum())
        greatest = _greatest(torch.where(rows > 0, sample.staleness, -math.inf))
        statistics["staleness/max"] = Statistic(Reduction.MAX, (greatest,))
    return statistics, Mismatch(ratio, old_total)


@torch.no_grad()
def of_step(
    sample: Sample, mismatch: Mismatch, log_r: Tensor, log_full: Tensor, log_prob: Tensor, advantages: Tensor
) -> tuple[dict[str, Statistic], Moments]:
    """The drift pi / pi_old and the whole pi / mu at one gradient step, with the latter's moments; tensors (B, T)."""
    count = sample.length.sum()
    current_total = mismatch.old_total + log_r.sum(dtype=torch.float64)
    ppo, full = (_moments(sample, excess(value), value, exp_clamped) for value in (log_r, log_full))
    statistics = {
        "nonfinite/log_prob": st.total(_not_finite(log_prob, sample.mask)),
        "nonfinite/advantages": st.total(_not_finite(advantages, sample.mask)),
        "perplexity/current": Statistic(Reduction.PERPLEXITY, (current_total, count)),
    }
    return statistics | ppo.statistics("ppo_ratio") | full.statistics("full_ratio"), full


@torch.no_grad()
def of_weight(
    sample: Sample, spec: WeightSpec | None, weighed: Weighed | None, ratio: Moments | None
) -> dict[str, Statistic]:
    """The weight as applied, with 0 where it rejects, beside the raw one.

    Args:
        spec, weighed: None where no weight is configured, and all are 1.
        ratio: of the ratio that is weighed, by token; None leaves the raw weight out.
    """
    count = sample.length.sum()
    if spec is None or weighed is None:
        nothing = torch.zeros_like(count)
        return _unless_empty(Moments(nothing, nothing, count, nothing + 1, nothing + 1)).statistics("weight")
    applied = weighed.weight
    if spec.kind == "reject":
        applied = applied * _number(~weighed.drop).to(applied.dtype)
    statistics = _moments(sample, applied.double() - sample.valid_number, applied, _as_it_is).statistics("weight")
    if ratio is not None:
        raw = ratio if spec.level == "token" else _of_units(weighed, sample.valid)
        statistics |= raw.statistics("raw_weight")
    beyond = torch.zeros_like(sample.valid)
    if spec.upper is not None:
        beyond = beyond | (weighed.raw > spec.upper)
    if spec.lower is not None:
        beyond = beyond | (sample.valid & (weighed.raw < spec.lower))
    statistics["weight/truncated_share"] = st.mean(_row_count(beyond).sum(), count)
    return statistics


@torch.no_grad()
def of_keep(sample: Sample, keep: Tensor, rejected: Mapping[str, Tensor], advantages: Tensor) -> dict[str, Statistic]:
    """What is left, and what each part rejects by itself, each tensor (B, T)."""
    kept = _row_count(keep)
    columns = {
        "tokens": sample.tokens,
        "rows": sample.groups[""],
        "kept": kept,
        "kept_rows": (kept > 0).double(),
        "valid_rows": (sample.length > 0).double(),
    }
    for key, drop in rejected.items():
        dropped = _row_count(sample.valid & drop)
        columns[f"{key} tokens"] = dropped
        columns[f"{key} rows"] = ((dropped == sample.length) & (dropped > 0)).double()
    # The sign of a row is that of its sum, as masks see it. A value that is not finite stops the run.
    advantage = (advantages.nan_to_num(0.0, 0.0, 0.0) * sample.valid_number).sum(-1)
    signs = dict(zip(SIGNS, ((advantage > 0).double(), (advantage < 0).double()), strict=True))
    by_group = _by_group(sample.groups | signs, columns)
    sums = by_group[""]
    statistics = {"keep/token_mask_ratio": st.mean(sums["tokens"] - sums["kept"], sums["tokens"])}
    for group, sums in by_group.items():
        token_share, row_share = st.mean(sums["kept"], sums["tokens"]), st.mean(sums["kept_rows"], sums["rows"])
        if group.startswith("length/"):
            statistics |= {f"{group}/keep_token_share": token_share, f"{group}/keep_sequence_share": row_share}
        elif group.startswith("staleness/"):
            statistics[f"{group}/keep_token_share"] = token_share
        else:
            by_sign = f"{group}/" if group else ""
            statistics |= {f"keep/{by_sign}token_share": token_share, f"keep/{by_sign}sequence_share": row_share}
            for key in rejected:
                name = f"{key.replace('masks.', 'mask/')}/{by_sign}"
                statistics[f"{name}masked_token_share"] = st.mean(sums[f"{key} tokens"], sums["tokens"])
                statistics[f"{name}masked_sequence_share"] = st.mean(sums[f"{key} rows"], sums["valid_rows"])
    keep_number = _number(keep)
    for name, turn in sample.turns.items():
        statistics[f"turn/{name}/keep_token_share"] = st.mean(_dot(turn, keep_number), turn.sum())
    return statistics


def _moments(sample: Sample, above: Tensor, values: Tensor, weight: Callable[[Tensor], Tensor]) -> Moments:
    """Of one weight a valid token.

    Args:
        above: (B, T) float64, w - 1, 0 off valid tokens.
        values: (B, T), 0 off valid tokens, which ``weight`` turns into w and which grow with it.
    """
    return _unless_empty(
        Moments(
            excess=above.sum(),
            square=_dot(above, above),
            count=sample.length.sum(),
            least=weight(_least(values + sample.padding).double()),
            greatest=weight(_greatest(values - sample.padding).double()),
        )
    )


def _of_units(weighed: Weighed, valid: Tensor) -> Moments:
    """Of the raw weight of each valid token, from the weights of the units that they share."""
    tokens = Units(valid, weighed.units.index, weighed.units.level).tokens
    return _of_counted(weighed.by_unit, tokens)


def _of_sequences(log_product: Tensor, length: Tensor) -> Moments:
    """Of one weight a row that has a valid token, from its log: (B,) each."""
    return _of_counted(log_product, (length > 0).double())


def _of_counted(log_weight: Tensor, count: Tensor) -> Moments:
    """Of weights that occur ``count`` times each, from their logs; both float64 of one shape."""
    above = excess(log_weight)
    weight, there = exp_clamped(log_weight), count > 0
    return Moments(
        excess=_dot(count, above),
        square=_dot(count, above.square()),
        count=count.sum(),
        least=_least(torch.where(there, weight, math.inf)),
        greatest=_greatest(torch.where(there, weight, -math.inf)),
    )


def _unless_empty(moments: Moments) -> Moments:
    """With extremes of nothing where nothing is counted."""
    some = moments.count > 0
    return replace(
        moments,
        least=torch.where(some, moments.least, math.inf),
        greatest=torch.where(some, moments.greatest, -math.inf),
    )


def _by_group(groups: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Sum of each column over the rows of each group, from (B,) tensors."""
    sums = torch.stack(list(groups.values())) @ torch.stack(list(columns.values()), dim=-1)
    return {
        group: dict(zip(columns, row.unbind(), strict=True)) for group, row in zip(groups, sums.unbind(), strict=True)
    }


def _inside(log_value: Tensor, limits: tuple[float, float]) -> Tensor:
    """As ``masks.outside`` compares."""
    value = log_value.to(torch.float32)
    return (value >= limits[0]) & (value <= limits[1])


def _not_finite(values: Tensor, mask: Tensor) -> Tensor:
    """How many values are not finite where the mask is true: x - x is 0 or NaN."""
    return ((values - values).nan_to_num(1.0) * mask.view(torch.uint8)).sum(dtype=torch.float64)


def _number(mask: Tensor) -> Tensor:
    return mask.view(torch.uint8).double()


def _row_count(mask: Tensor) -> Tensor:
    return mask.view(torch.uint8).sum(-1).double()


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return torch.dot(one.flatten(), other.flatten())


def _least(values: Tensor) -> Tensor:
    return values.amin() if values.numel() else values.new_full((), math.inf)


def _greatest(values: Tensor) -> Tensor:
    return values.amax() if values.numel() else values.new_full((), -math.inf)


def _as_it_is(weight: Tensor) -> Tensor:
    return weight
