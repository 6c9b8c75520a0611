"""The two stages of a correction.

``rollout_stage`` holds what mu and pi_old decide, once per rollout; ``step_stage`` adds what pi and the advantages
decide, at every gradient step. log(pi/mu) is the sum of the first stage's log(pi_old/mu) and the second stage's
log(pi/pi_old), so OPSM costs one new sum a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from . import statistics as st
from .masks import aggregate, applies, rejected
from .ratios import EXP_CLAMP, exp_clamped, log_ratio, row_sum, valid_tokens
from .spec import CorrectionSpec
from .statistics import Statistic
from .weights import bounded, raw_weight

COLUMNS: Final = ("tokens", "log_ratio_sum")
"""Columns of ``RolloutStage.table``: T, the number of valid tokens, and sum_t log(pi_old / mu) in nats."""


@dataclass(frozen=True)
class RolloutStage:
    """What mu and pi_old decide.

    Attributes:
        spec: the correction that decided; the step stage must be of the same.
        table: (B, len(COLUMNS)) float64, statistics of each sequence.
        weight: (B, T) float32 or wider, detached, 0 off ``valid``.
        keep: (B, T) bool, False off ``valid`` and where a mask that needs neither pi nor advantages rejects.
        rejected: mask name -> (B,) bool, for the masks decided here.
        log_ratio: (B, T) log(pi_old / mu), 0 off ``valid``.
        valid: (B, T) bool, the response mask less tokens whose mu or pi_old is not finite.
        response_mask: (B, T) bool, as given.
        old_log_prob: (B, T), as given.
        statistics: name -> typed statistic.
    """

    spec: CorrectionSpec
    table: Tensor
    weight: Tensor
    keep: Tensor
    rejected: dict[str, Tensor]
    log_ratio: Tensor
    valid: Tensor
    response_mask: Tensor
    old_log_prob: Tensor
    statistics: dict[str, Statistic]

    @property
    def tokens(self) -> Tensor:
        """(B,) float64, T."""
        return self.table[:, 0]

    @property
    def log_ratio_sum(self) -> Tensor:
        """(B,) float64, sum_t log(pi_old / mu)."""
        return self.table[:, 1]


@dataclass(frozen=True)
class StepStage:
    """What one gradient step uses.

    Attributes:
        weight: (B, T) float32 or wider, detached; never multiplied by ``keep``; 0 off the response mask.
        keep: (B, T) bool; False off the response mask.
        statistics: name -> typed statistic, those of the rollout stage included.
    """

    weight: Tensor
    keep: Tensor
    statistics: dict[str, Statistic]


def rollout_stage(
    spec: CorrectionSpec, *, old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> RolloutStage:
    """Weights, masks and statistics that depend on pi_old / mu alone.

    A token whose mu or pi_old is not finite leaves weights, masks, T and statistics, and is counted.

    Args:
        old_log_prob: (B, T) log pi_old, any float dtype.
        rollout_log_prob: (B, T) log mu, any float dtype.
        response_mask: (B, T) bool or 0/1; padding is never read.

    Raises:
        ValueError: shapes that differ.
    """
    _same_shape(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask)
    mask = response_mask.bool()
    valid = valid_tokens(mask, old_log_prob, rollout_log_prob)
    log_rho = log_ratio(old_log_prob, rollout_log_prob, valid)
    tokens, log_rho_sum = row_sum(valid), row_sum(log_rho)

    raw = raw_weight(spec.weight, log_rho, log_rho_sum, valid)
    weight = bounded(spec.weight, raw, valid)
    drops = {name: rejected(m, aggregate(m, log_rho_sum, tokens)) for name, m in spec.masks if not m.needs_step}
    keep = valid
    for drop in drops.values():
        keep = keep & ~drop[:, None]

    return RolloutStage(
        spec=spec,
        table=torch.stack([tokens, log_rho_sum], dim=-1),
        weight=weight,
        keep=keep,
        rejected=drops,
        log_ratio=log_rho,
        valid=valid,
        response_mask=mask,
        old_log_prob=old_log_prob,
        statistics=_rollout_statistics(mask, valid, log_rho, old_log_prob, rollout_log_prob)
        | _weight_statistics(spec, valid, raw, weight),
    )


def step_stage(spec: CorrectionSpec, stage: RolloutStage, *, log_prob: Tensor, advantages: Tensor) -> StepStage:
    """Weight and keep of one gradient step.

    Args:
        stage: from ``rollout_stage`` of the same rows.
        log_prob: (B, T) log pi, detached here. The caller stops on a value that is not finite (it is counted in
            ``nonfinite/log_prob``, and advantages likewise): no mask can keep it out of the gradient.
        advantages: (B, T); only the sign of each row's mean over its valid tokens is used.

    Raises:
        ValueError: shapes that differ, or a stage of another correction.
    """
    if spec != stage.spec:
        raise ValueError(
            f"the rollout stage was decided by {stage.spec.to_mapping()}, the step stage is asked for "
            f"{spec.to_mapping()}: run rollout_stage again with the new correction."
        )
    _same_shape(response_mask=stage.response_mask, log_prob=log_prob, advantages=advantages)
    log_r = log_ratio(log_prob, stage.old_log_prob, stage.valid)
    log_r_sum = row_sum(log_r)
    row_log_ratio = {"rollout": stage.log_ratio_sum, "ppo": log_r_sum, "full": stage.log_ratio_sum + log_r_sum}
    advantage_sign = row_sum(torch.where(stage.valid, advantages.detach(), torch.zeros_like(advantages))).sign()

    drops = dict(stage.rejected)
    keep = stage.keep
    for name, mask in spec.masks:
        if mask.needs_step:
            outside = rejected(mask, aggregate(mask, row_log_ratio[mask.ratio], stage.tokens))
            drops[name] = outside & applies(mask.when, advantage_sign)
            keep = keep & ~drops[name][:, None]

    statistics = dict(stage.statistics)
    statistics["nonfinite/log_prob"] = st.total(stage.response_mask & ~torch.isfinite(log_prob))
    statistics["nonfinite/advantages"] = st.total(stage.response_mask & ~torch.isfinite(advantages))
    statistics |= _distribution("ppo_ratio", exp_clamped(log_r), stage.valid)
    statistics |= _distribution("full_ratio", exp_clamped(stage.log_ratio + log_r), stage.valid)
    statistics |= _keep_statistics(spec, stage, keep, drops)
    return StepStage(weight=stage.weight, keep=keep, statistics=statistics)


def _same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 2:
        raise ValueError(f"expected tensors of one shape (B, T), got {shapes}")


def _rollout_statistics(
    mask: Tensor, valid: Tensor, log_rho: Tensor, old_log_prob: Tensor, rollout_log_prob: Tensor
) -> dict[str, Statistic]:
    return _distribution("rollout_ratio", exp_clamped(log_rho), valid) | {
        "log_prob_difference/mean": st.mean(log_rho, valid),
        "log_prob_difference/std": st.std(log_rho, valid),
        "log_prob_difference/abs_mean": st.mean(log_rho.abs(), valid),
        # KL(mu || pi_old) from mu's own samples: k1 = -log rho, k3 = rho - 1 - log rho (Schulman 2020).
        "kl/k1": st.mean(-log_rho, valid),
        "kl/k3": st.mean(torch.expm1(log_rho.clamp(-EXP_CLAMP, EXP_CLAMP)) - log_rho, valid),
        "nonfinite/rollout_log_prob": st.total(mask & ~torch.isfinite(rollout_log_prob)),
        "nonfinite/old_log_prob": st.total(mask & ~torch.isfinite(old_log_prob)),
    }


def _weight_statistics(spec: CorrectionSpec, valid: Tensor, raw: Tensor, weight: Tensor) -> dict[str, Statistic]:
    statistics = _distribution("weight", weight, valid)
    if spec.weight is not None:
        statistics |= _distribution("raw_weight", raw, valid)
        statistics["weight/truncated_share"] = st.share(valid & (raw != weight), valid)
    return statistics


def _distribution(name: str, values: Tensor, valid: Tensor) -> dict[str, Statistic]:
    return {
        f"{name}/mean": st.mean(values, valid),
        f"{name}/std": st.std(values, valid, about=1.0),
        f"{name}/min": st.minimum(values, valid),
        f"{name}/max": st.maximum(values, valid),
        f"{name}/ess": st.effective_sample_size(values, valid),
    }


def _keep_statistics(
    spec: CorrectionSpec, stage: RolloutStage, keep: Tensor, drops: dict[str, Tensor]
) -> dict[str, Statistic]:
    rows = stage.tokens > 0
    statistics = {
        "keep/token_share": st.share(keep, stage.response_mask),
        "keep/sequence_share": st.share(keep.any(-1), stage.response_mask.any(-1)),
        "keep/token_mask_ratio": st.share(stage.response_mask & ~keep, stage.response_mask),
    }
    for name, _ in spec.masks:
        dropped = drops[name]
        statistics[f"mask/{name}/masked_sequence_share"] = st.share(dropped & rows, rows)
        statistics[f"mask/{name}/masked_token_share"] = st.share(stage.valid & dropped[:, None], stage.response_mask)
    return statistics
