"""Exact bias, drift and variance of every option of the group ``correction``, read from its file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from enumeration import Policies, outer
from expectation import Measurement, summarise
from torch import Tensor

from recipe.offpolicy.correction import (
    BatchConstants,
    CorrectionSpec,
    RolloutStage,
    StepStage,
    proximal_log_prob,
    rollout_stage,
    step_stage,
)
from recipe.offpolicy.correction.centering import compute_coefficients, select_token_parts

OPTIONS = Path(__file__).resolve().parents[2] / "configs" / "correction"
DELTA, AGE = 0.1, 2
"""Where an option leaves its delta open; and the age of all tokens, for what goes by age."""
CHOICES = ("auto",)
"""Files that choose among the others at the start of a run."""


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: as Hydra takes it.
        spec: the correction by itself.
    """

    name: str
    spec: CorrectionSpec


def list_options() -> Iterator[Option]:
    """List all options, with their files' values."""
    for path in sorted(OPTIONS.rglob("*.yaml")):
        name = path.relative_to(OPTIONS).with_suffix("").as_posix()
        if name in CHOICES:
            continue
        values: dict[str, Any] = yaml.safe_load(path.read_text()) or {}
        for mask in (values.get("masks") or {}).values():
            mask.update({"delta": DELTA} if mask.get("delta") == "???" else {})
        yield Option(name, CorrectionSpec.from_mapping(values))


def measure_option(option: Option, policies: Policies) -> Measurement:
    """Measure one option: E_mu over all sequences of its gradient, as the limit of a large batch.

    The base loss is PPO's without its clip, or REINFORCE under weights on pi / mu. KL terms are left out: they do not
    change the policy term.
    """
    spec, mu = option.spec, policies.probability
    old = proximal_log_prob(
        spec.proximal,
        spec.alpha,
        old_log_prob=policies.old,
        rollout_log_prob=policies.mu,
        log_prob=policies.pi,
        ages=_fill(policies, AGE),
    )
    advantage = policies.rewards - mu @ policies.rewards
    stage, step = _decide(spec, policies, old, advantage)
    if spec.baseline == "exclude":
        kept = mu * stage.keep.any(-1)
        advantage = policies.rewards - kept @ policies.rewards / kept.sum()
        stage, step = _decide(spec, policies, old, advantage)
    factor = step.weight * step.keep
    if not spec.weighs_full_ratio:
        factor = factor * (policies.pi - old).exp()
    if spec.denominator == "kept":
        factor = factor / (mu @ stage.keep.double().mean(-1))
    score = torch.einsum("nt,ntp->np", factor, policies.scores)
    if spec.centering is not None:
        score = score - _expected_score(spec, policies, step)
    rows = advantage[:, None] * score
    if spec.penalty is not None:
        other = policies.mu if spec.penalty.ratio == "full" else old
        pull = 2 * spec.penalty.coefficient * (policies.pi - other)
        rows = rows - torch.einsum("nt,ntp->np", pull, policies.scores)
    return summarise(rows, score, policies, dropped=float(mu @ (~step.keep).double().mean(-1)))


def _decide(spec: CorrectionSpec, policies: Policies, old: Tensor, advantage: Tensor) -> tuple[RolloutStage, StepStage]:
    columns: dict[str, Any] = dict(
        old_log_prob=old,
        rollout_log_prob=policies.mu,
        response_mask=torch.ones_like(old, dtype=torch.bool),
        # Two turns, the second after a tool.
        segment_ids=(torch.arange(old.shape[1]) >= old.shape[1] // 2).long().expand_as(old),
        versions=_fill(policies, 0),
        staleness=_fill(policies, AGE)[:, 0],
    )
    mean = 1.0
    if (normalized := spec.normalized) is not None:
        plain = CorrectionSpec(weight=replace(normalized, normalize=False))
        raw = rollout_stage(plain, **columns)
        mean = float(policies.probability @ (raw.weight * raw.keep).mean(-1))
    cutoffs = {
        name: _find_cutoff(mask.budget, policies, old - policies.mu)
        for name, mask in spec.masks
        if mask.budget is not None
    }
    stage = rollout_stage(spec, **columns, constants=BatchConstants(weight_mean=mean, cutoffs=cutoffs))
    return stage, step_stage(spec, stage, log_prob=policies.pi, advantages=advantage[:, None].expand_as(old))


def _find_cutoff(budget: float, policies: Policies, log_ratio: Tensor) -> float:
    """Find the largest (log r)^2 up to which the mean of (log r)^2 is within the budget."""
    squares, order = log_ratio.square().flatten().sort()
    mass = (policies.probability[:, None].expand_as(log_ratio).flatten() / log_ratio.shape[1])[order]
    kept = (mass * squares).cumsum(0) / mass.cumsum(0) <= budget
    return float(squares[kept][-1]) if bool(kept.any()) else 0.0


def _expected_score(spec: CorrectionSpec, policies: Policies, step: StepStage) -> Tensor:
    """Compute sum_t of what score centering subtracts, over the whole vocabulary: (N, P)."""
    shape = policies.all_pi.shape
    flat = (each.reshape(-1, shape[-1]) for each in (policies.all_pi, policies.all_mu))
    coefficients = compute_coefficients(spec, *flat).view(shape)
    by_logits = coefficients - coefficients.sum(-1, keepdim=True) * policies.all_pi.exp()
    centred = {f"masks.{name}" for name, _ in select_token_parts(spec).masks} | set(spec.all_weights)
    kept = torch.ones_like(step.keep)
    for part, drop in step.rejected.items():
        kept = kept if part in centred else kept & ~drop
    return (kept[..., None] * outer(policies.features, by_logits)).sum(1)


def _fill(policies: Policies, value: int) -> Tensor:
    return torch.full(policies.pi.shape, value, dtype=torch.int64)
