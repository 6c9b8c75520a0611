"""Measurement of a correction's statistics, which add up over micro-batches and ranks.

``statistics`` defines each statistic. Everything is summed in float64, over the original response mask.

On long rows, creating tensors with one value per token dominates the cost, so each log-ratio is exponentiated once, and
counts by length, sign and staleness are computed from row sums. On short rows, the number of operations determines the
cost. Boolean masks are used as numbers, because on CPUs torch is much slower at boolean selection than at arithmetic.

For "tensor of tokens" and "column" see ``row_layout.RowLayout``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from .ratios import compute_excess, exceeds_bounds
from .statistics import SIGNS, Reduction, Statistic
from .token_sample import TokenSample, to_float64
from .weights import AppliedWeight

Measure = Literal["all", "decisions", "nothing"]
"""What to measure: all statistics, only the statistics of weights and kept tokens, or nothing."""

_GEOMETRIC: Final = (math.log(0.99), math.log(1.01))
_PRODUCT: Final = (math.log(0.5), math.log(2.0))


@dataclass(frozen=True)
class Moments:
    """Partial sums over a sample of weights w, computed from w - 1, which loses no digits if w is near 1.

    Each attribute is a 0-dim float64 tensor.

    Attributes:
        excess: sum of w - 1.
        square: sum of (w - 1)^2.
        count: number of weights.
        least, greatest: least and greatest w - 1; meaningless without weights.
    """

    excess: Tensor
    square: Tensor
    count: Tensor
    least: Tensor
    greatest: Tensor

    def build_statistics(self, name: str) -> dict[str, Statistic]:
        """Build mean, std, min, max, ess and chi2 under ``name``."""
        sums = (self.excess, self.square, self.count)
        return {
            f"{name}/mean": Statistic(Reduction.MEAN, (self.excess, self.count), about=1.0),
            f"{name}/std": Statistic(Reduction.STD, sums),
            f"{name}/min": Statistic(Reduction.MIN, (self.least, self.count), about=1.0),
            f"{name}/max": Statistic(Reduction.MAX, (self.greatest, self.count), about=1.0),
            f"{name}/ess": Statistic(Reduction.ESS, sums),
            f"{name}/chi2": Statistic(Reduction.CHI2, sums),
        }


@dataclass(frozen=True)
class Mismatch:
    """Results of the rollout stage that statistics of the step stage reuse.

    Attributes:
        ratio: moments of pi_old / mu per token.
        old_total: sum of log pi_old over valid tokens.
    """

    ratio: Moments
    old_total: Tensor


@torch.no_grad()
def measure_rollout(
    sample: TokenSample, log_rho: Tensor, old_log_prob: Tensor, rollout_log_prob: Tensor
) -> tuple[dict[str, Statistic], Mismatch]:
    """Measure the mismatch pi_old / mu; each tensor has one value per token.

    Example:
        >>> from .row_layout import detect_layout
        >>> from .token_sample import build_sample
        >>> mask, mu = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[-1.0, -2.0]])
        >>> sample = build_sample(detect_layout(mask=mask), mask, mask, None, None)
        >>> statistics, _ = measure_rollout(sample, torch.zeros(1, 2).double(), mu, mu)
        >>> statistics["kl/k3"].value(), statistics["perplexity/old"].value() == math.exp(1.5)
        (0.0, True)
    """
    rows, count = sample.rows, sample.count
    above = compute_excess(log_rho)
    by_row = rows.sum(log_rho)
    k3_by_row = rows.sum(above) - by_row
    log_total = by_row.sum()
    ratio = _of_tokens(sample, above)
    old_total = _dot(old_log_prob.double().nan_to_num(0.0, 0.0, 0.0), sample.valid_number)
    sequences = _of_counted(by_row, sample.rows_with_length)
    not_finite = _not_finite(sample, rollout_log_prob, old_log_prob)
    statistics = ratio.build_statistics("rollout_ratio") | sequences.build_statistics("rollout_ratio_sequence")
    statistics |= {
        "log_prob_difference/mean": _mean(log_total, count),
        "log_prob_difference/std": Statistic(Reduction.STD, (log_total, _square(log_rho), count)),
        "log_prob_difference/abs_mean": _mean(torch.linalg.vector_norm(log_rho, 1), count),
        # KL(mu || pi_old) from mu's own samples (Schulman 2020).
        "kl/k1": _mean(-log_total, count),
        "kl/k3": _mean(k3_by_row.sum(), count),
        "perplexity/rollout": Statistic(Reduction.PERPLEXITY, (old_total - log_total, count)),
        "perplexity/old": Statistic(Reduction.PERPLEXITY, (old_total, count)),
        "nonfinite/rollout_log_prob": _sum(not_finite[0]),
        "nonfinite/old_log_prob": _sum(not_finite[1]),
    }
    columns = {
        "rows": sample.tokens > 0,
        "tokens": sample.length,
        "k3": k3_by_row,
        "geometric": ~exceeds_bounds(by_row / sample.length.clamp(min=1), *_GEOMETRIC),
        "product": ~exceeds_bounds(by_row, *_PRODUCT),
    }
    for name, sums in sample.groups.sum_columns(columns).items():
        if name.startswith("length/"):
            statistics[f"{name}/sequences"] = _sum(sums["rows"])
            statistics[f"{name}/geometric_keep_share"] = _mean(sums["geometric"], sums["rows"])
            statistics[f"{name}/product_keep_share"] = _mean(sums["product"], sums["rows"])
        elif name.startswith("staleness/"):
            statistics[f"{name}/token_count"] = _sum(sums["tokens"])
            statistics[f"{name}/kl_k3"] = _mean(sums["k3"], sums["tokens"])
    if sample.turns is not None:
        by_turn = sample.sum_by_turn(sample.valid_number, above - log_rho, above, above.square())
        for name, (counted, k3, turn_excess, square) in by_turn.items():
            statistics[f"turn/{name}/token_count"] = _sum(counted)
            statistics[f"turn/{name}/kl_k3"] = _mean(k3, counted)
            statistics[f"turn/{name}/rollout_ratio/mean"] = _mean(turn_excess, counted, about=1.0)
            statistics[f"turn/{name}/rollout_ratio/std"] = Statistic(Reduction.STD, (turn_excess, square, counted))
    for name, (counted, k3) in sample.sum_by_age(sample.valid_number, above - log_rho).items():
        statistics[f"staleness/{name}/token_count"] = _sum(counted)
        statistics[f"staleness/{name}/kl_k3"] = _mean(k3, counted)
    if sample.staleness is not None:
        some = (sample.tokens > 0).double() if sample.ages is None else to_float64(sample.mask)
        # Ages are 0 or more, so the 0 that stands for excluded tokens never exceeds the greatest age.
        ages = some * sample.staleness
        counted = some.sum()
        statistics["staleness/mean"] = _mean(ages.sum(), counted)
        statistics["staleness/max"] = Statistic(Reduction.MAX, (_greatest(ages), counted))
    return statistics, Mismatch(ratio, old_total)


@torch.no_grad()
def measure_step(
    sample: TokenSample, mismatch: Mismatch, log_r: Tensor, log_full: Tensor, log_prob: Tensor, advantages: Tensor
) -> tuple[dict[str, Statistic], Moments]:
    """Measure the drift pi / pi_old and the full ratio pi / mu at one gradient step; also return moments of pi / mu.

    Example:
        >>> from .row_layout import detect_layout
        >>> from .token_sample import build_sample
        >>> mask, mu = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[-1.0, -2.0]])
        >>> sample = build_sample(detect_layout(mask=mask), mask, mask, None, None)
        >>> zero = torch.zeros(1, 2).double()
        >>> _, mismatch = measure_rollout(sample, zero, mu, mu)
        >>> log_r = torch.tensor([[2.0, 0.5]]).double().log()
        >>> statistics, _ = measure_step(sample, mismatch, log_r, log_r, mu + log_r, zero)
        >>> round(statistics["ppo_ratio/mean"].value(), 9)
        1.25
    """
    # log pi = log pi_old + log r, so pi itself need not be read again.
    current_total = mismatch.old_total + log_r.sum()
    ppo, full = (_of_tokens(sample, compute_excess(value)) for value in (log_r, log_full))
    not_finite = _not_finite(sample, log_prob, advantages)
    statistics = {
        "nonfinite/log_prob": _sum(not_finite[0]),
        "nonfinite/advantages": _sum(not_finite[1]),
        "perplexity/current": Statistic(Reduction.PERPLEXITY, (current_total, sample.count)),
    }
    return statistics | ppo.build_statistics("ppo_ratio") | full.build_statistics("full_ratio"), full


@torch.no_grad()
def measure_weight(sample: TokenSample, weighed: AppliedWeight | None, ratio: Moments | None) -> dict[str, Statistic]:
    """Measure the applied weight, which is 0 for rejected tokens, and the raw weight.

    Args:
        weighed: None if no weight is configured and all weights are 1.
        ratio: moments of the weighted ratio, per token; None: the raw weight is not measured.

    Example:
        >>> from .row_layout import detect_layout
        >>> from .token_sample import build_sample
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> sample = build_sample(detect_layout(mask=mask), mask, mask, None, None)
        >>> measure_weight(sample, None, None)["weight/mean"].value()  # no weight is a weight of 1
        1.0
    """
    count = sample.count
    if weighed is None:
        nothing = torch.zeros_like(count)
        return Moments(nothing, nothing, count, nothing, nothing).build_statistics("weight")
    applied = weighed.weight.double()
    if weighed.drop is not None:
        applied = applied * ~weighed.drop
    statistics = _of_tokens(sample, applied - sample.valid_number).build_statistics("weight")
    if ratio is not None:
        raw = ratio if weighed.spec.level == "token" else _of_units(weighed, sample.valid)
        statistics |= raw.build_statistics("raw_weight")
    statistics["weight/truncated_share"] = _mean(_out_of_bounds(weighed, sample.valid), count)
    return statistics


@torch.no_grad()
def measure_weights_by_sign(
    sample: TokenSample, weighed: Sequence[AppliedWeight], *, raw: bool
) -> dict[str, Statistic]:
    """Measure weights that each apply to some tokens, as in ``measure_weight``; tokens without a weight count as 1.

    Args:
        weighed: weights restricted to disjoint sets of tokens, see ``AppliedWeight.restrict``.
        raw: also measure the weights before their bounds are applied.

    Example:
        >>> from .row_layout import detect_layout
        >>> from .token_sample import build_sample
        >>> from .units import partition_units
        >>> from .weights import WeightSpec
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> sample = build_sample(detect_layout(mask=mask), mask, mask, None, None)
        >>> spec, log_r = WeightSpec("token", "truncate", None, 1.0, when="negative"), torch.zeros(1, 2).double()
        >>> half = torch.full((1, 2), 0.5)
        >>> weighed = AppliedWeight(spec, partition_units("token", mask, None), log_r, half, half, None, (None, 1.0))
        >>> negative = weighed.restrict(torch.tensor([[True, False]]))
        >>> measure_weights_by_sign(sample, [negative], raw=False)["weight/mean"].value()
        0.75
    """
    nothing = torch.zeros_like(sample.valid_number)
    applied_above, raw_above = nothing, nothing
    outside = torch.zeros_like(sample.count)
    for one in weighed:
        assert one.at is not None, "this weight applies to every token: use measure_weight instead"
        applied = one.weight.double() if one.drop is None else one.weight.double() * ~one.drop
        applied_above = torch.where(one.at, applied - 1, applied_above)
        outside = outside + _out_of_bounds(one, one.at)
        if raw:
            raw_above = torch.where(one.at, one.units.spread(compute_excess(one.by_unit)), raw_above)
    statistics = _of_tokens(sample, applied_above).build_statistics("weight")
    if raw:
        statistics |= _of_tokens(sample, raw_above).build_statistics("raw_weight")
    return statistics | {"weight/truncated_share": _mean(outside, sample.count)}


@torch.no_grad()
def measure_penalty(log_ratio: Tensor, decided: Tensor) -> dict[str, Statistic]:
    """Measure the mean of (log r)^2, which a penalty multiplies by its coefficient.

    Args:
        log_ratio: log r per token, 0 outside ``decided``.
        decided: bool per token, the penalised tokens.

    Example:
        >>> measure_penalty(torch.tensor([[2.0, 0.0]]).double(), torch.tensor([[True, True]]))["penalty/mean"].value()
        2.0
    """
    return {"penalty/mean": _mean(_square(log_ratio), decided.sum(dtype=torch.float64))}


@torch.no_grad()
def measure_keep(
    sample: TokenSample,
    keep: Tensor,
    rejected: Mapping[str, Tensor],
    advantages: Tensor,
    decided: Tensor,
    token_masks: Collection[str] = (),
) -> dict[str, Statistic]:
    """Measure which tokens are kept, and which ``decided`` tokens each part rejects; all tensors are per token.

    ``token_masks`` are the keys of ``rejected`` that ``token_mask_ratio`` counts, each token once.

    Example:
        >>> from .row_layout import detect_layout
        >>> from .token_sample import build_sample
        >>> mask = torch.ones(1, 4, dtype=torch.bool)
        >>> sample = build_sample(detect_layout(mask=mask), mask, mask, None, None)
        >>> drop = torch.tensor([[True, False, False, False]])
        >>> statistics = measure_keep(sample, ~drop, {"masks.tm": drop}, torch.ones(1, 4), mask)
        >>> statistics["keep/token_share"].value(), statistics["mask/tm/masked_token_share"].value()
        (0.75, 0.25)
    """
    rows = sample.rows
    kept, length = rows.sum(keep), rows.sum(decided)
    rows_with_length = (length > 0).double()
    masked = torch.zeros_like(decided)
    for key in token_masks:
        masked = masked | rejected[key]
    columns = {
        "token_masked": rows.sum(decided & masked),
        "tokens": sample.tokens,
        "rows": sample.tokens > 0,
        "kept": kept,
        "kept_rows": kept > 0,
        "decided_rows": rows_with_length,
    }
    for key, drop in rejected.items():
        dropped = rows.sum(decided & drop)
        columns[f"{key} tokens"] = dropped
        columns[f"{key} rows"] = (dropped == length) * rows_with_length
    # As for masks, the sign of a row is the sign of its sum. A value that is not finite stops the run.
    advantage = rows.sum(advantages.nan_to_num(0.0, 0.0, 0.0) * decided)
    by_group = sample.groups.add_signs(advantage, SIGNS).sum_columns(columns)
    sums = by_group[""]
    statistics = {"keep/token_mask_ratio": _mean(sums["token_masked"], sums["tokens"])}
    for group, sums in by_group.items():
        token_share = _mean(sums["kept"], sums["tokens"])
        row_share = _mean(sums["kept_rows"], sums["rows"])
        if group.startswith("length/"):
            statistics |= {f"{group}/keep_token_share": token_share, f"{group}/keep_sequence_share": row_share}
        elif group.startswith("staleness/"):
            statistics[f"{group}/keep_token_share"] = token_share
        else:
            by_sign = f"{group}/" if group else ""
            statistics |= {f"keep/{by_sign}token_share": token_share, f"keep/{by_sign}sequence_share": row_share}
            for key in rejected:
                name = f"{key.replace('masks.', 'mask/').replace('weights.', 'weights/')}/{by_sign}"
                statistics[f"{name}masked_token_share"] = _mean(sums[f"{key} tokens"], sums["tokens"])
                statistics[f"{name}masked_sequence_share"] = _mean(sums[f"{key} rows"], sums["decided_rows"])
    by_token = () if sample.turns is None and sample.ages is None else (to_float64(keep), to_float64(sample.mask))
    for name, (kept, tokens) in sample.sum_by_turn(*by_token).items():
        statistics[f"turn/{name}/keep_token_share"] = _mean(kept, tokens)
    for name, (kept, tokens) in sample.sum_by_age(*by_token).items():
        statistics[f"staleness/{name}/keep_token_share"] = _mean(kept, tokens)
    return statistics


def _of_tokens(sample: TokenSample, above: Tensor) -> Moments:
    """Compute the moments of one weight per valid token; ``above`` is the weight minus 1 in float64, 0 elsewhere."""
    return Moments(above.sum(), _square(above), sample.count, *sample.min_and_max(above))


def _of_units(weighed: AppliedWeight, valid: Tensor) -> Moments:
    """Compute the moments of the raw weight per valid token from the weights of the units."""
    units = weighed.units
    seen = units if units.valid is valid else replace(units, valid=valid)
    return _of_counted(weighed.by_unit, seen.sharing)


def _of_counted(log_weight: Tensor, count: Tensor) -> Moments:
    """Compute the moments of weights that occur ``count`` times each, from their logs; both are float64."""
    above = compute_excess(log_weight)
    counted = count * above
    none, far = (count == 0).double(), torch.finfo(torch.float64).max
    least = greatest = torch.zeros_like(counted.sum())
    if none.numel():
        # Weights that do not occur are moved beyond all other weights, which is cheaper than selection by a mask.
        least, greatest = torch.add(above, none, alpha=far).amin(), torch.sub(above, none, alpha=far).amax()
    return Moments(counted.sum(), _dot(counted, above), count.sum(), least, greatest)


def _greatest(column: Tensor) -> Tensor:
    return column.amax() if column.numel() else column.sum()


def _out_of_bounds(weighed: AppliedWeight, valid: Tensor) -> Tensor:
    """Count the valid tokens whose raw weight lies outside the bounds."""
    (lower, upper), raw = weighed.bounds, weighed.raw
    outside = torch.zeros_like(valid) if upper is None else valid & (raw > upper)
    if lower is not None:
        outside = outside | (valid & (raw < lower))
    return torch.count_nonzero(outside).double()


def _not_finite(sample: TokenSample, *values: Tensor) -> tuple[Tensor, ...]:
    """Count each tensor's non-finite values where the mask is true; x - x is NaN for these values, and 0 otherwise."""
    table = torch.stack([one.detach().flatten() for one in values])
    lost = (table - table).nan_to_num_(1.0) * sample.mask.flatten().view(torch.uint8)
    return lost.sum(1, dtype=torch.float64).unbind()


def _sum(value: Tensor) -> Statistic:
    return Statistic(Reduction.SUM, (value,))


def _mean(value: Tensor, count: Tensor, about: float = 0.0) -> Statistic:
    """Build a mean, or a share of a whole, from a sum and a count."""
    return Statistic(Reduction.MEAN, (value, count), about)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return torch.dot(one.flatten(), other.flatten())


def _square(values: Tensor) -> Tensor:
    flat = values.flatten()
    return torch.dot(flat, flat)
