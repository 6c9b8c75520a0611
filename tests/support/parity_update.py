"""The update of ``parity_case`` that each worker path must make.

The reference is a plain single process in float64, with one forward pass per row, no padding, and explicit formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipe.offpolicy.extensions.opd.signal import TEACHER
from tests.support import reference
from tests.support.parity_case import CLIP, DUAL_CLIP, ENTROPY_COEFF, KL_COEF, LENGTHS, MAX_GAP, TEACHER_COEF, Case


@dataclass
class Update:
    """The result of one mini-batch.

    Attributes:
        factor: what each token's policy term is multiplied by, by (row, token) of the batch.
        loss: of the policy term.
        gradients: of the whole loss, by parameter.
    """

    factor: dict[tuple[int, int], float]
    loss: float
    gradients: dict[str, Tensor]


def expected(case: Case, correction: Mapping[str, Any], mode: str, rows: range) -> Update:
    """Compute the update of one mini-batch of ``rows`` by the formulas."""
    from recipe.offpolicy.correction import CorrectionSpec

    plain = CorrectionSpec.from_mapping(correction).to_mapping()
    outputs = {row: case.forward(row) for row in rows}
    old = "rollout_log_probs" if plain["proximal"] == "bypass" else "old_log_probs"
    batch = reference.Batch(
        mu=[case.response("rollout_log_probs", row).tolist() for row in rows],
        old=[case.response(old, row).tolist() for row in rows],
        pi=[outputs[row][0].tolist() for row in rows],
        mask=[case.response("response_mask", row).bool().tolist() for row in rows],
        advantages=[case.response("advantages", row).tolist() for row in rows],
        segments=[[0] * LENGTHS[row] for row in rows],
        versions=[[0] * LENGTHS[row] for row in rows],
    )
    decided = reference.expected(plain, batch)
    assert decided.margin > 1e-4, "something stands on its bound: float32 may decide otherwise"
    counted = [(b, t) for b, row in enumerate(batch.mask) for t, counts in enumerate(row) if counts]
    rejected = {token for tokens in decided.rejected.values() for token in tokens}
    scale = len(counted) / len(set(counted) - rejected) if plain["denominator"] == "kept" else 1.0
    lost = [token for token in counted if not math.isfinite(batch.mu[token[0]][token[1]])]
    gone = [b for b, row in enumerate(batch.mask) if sum(row) == sum(token[0] == b for token in lost)]
    excludes = plain.get("nonfinite") == "excluded"
    total = torch.zeros((), dtype=torch.float64)
    policy = torch.zeros((), dtype=torch.float64)
    factors = {}
    for b, row in enumerate(rows):
        pi, entropy = outputs[row]
        mask = case.response("response_mask", row)
        if excludes:
            here = sum(token[0] == b for token in lost)
            of_row = float(mask.sum()) / (float(mask.sum()) - here) if b not in gone else 1.0
            of_rows = len(rows) / (len(rows) - len(gone))
            scale = {
                "token-mean": len(counted) / (len(counted) - len(lost)),
                "seq-mean-token-sum": of_rows,
                "seq-mean-token-mean": of_rows * of_row,
            }[mode]
        factor = torch.tensor([w * k for w, k in zip(decided.weight[b], decided.keep[b], strict=True)]) * scale
        factors |= {(row, t): float(factor[t]) for t in range(LENGTHS[row]) if mask[t]}
        term = factor * ppo(pi, case.response(old, row), case.response("advantages", row))
        apart = case.response("ref_log_prob", row) - pi
        kl = apart.exp() - apart - 1
        if kl_weight := plain.get("kl_weight"):
            other = case.response({"full": "rollout_log_probs", "ppo": old}[kl_weight["ratio"]], row)
            kl = (pi - other).exp().clamp(max=kl_weight["upper"]) * kl
        rest = KL_COEF * kl - ENTROPY_COEFF * entropy
        if penalty := plain.get("penalty"):
            other = case.response({"full": "rollout_log_probs", "ppo": old}[penalty["ratio"]], row)
            squares = torch.where(other.isfinite(), pi - other.nan_to_num(), 0.0).square()
            rest = rest + penalty["coefficient"] * (scale if excludes else 1.0) * squares
        if case.distilled == "loss":
            rest = rest + TEACHER_COEF * factor * k2(pi, case.response(TEACHER, row))
        divisor = {
            "token-mean": len(counted),
            "seq-mean-token-sum": len(rows),
            "seq-mean-token-mean": len(rows) * float(mask.sum()),
        }[mode]
        policy = policy + (term * mask).sum() / divisor
        total = total + ((term + rest) * mask).sum() / divisor
    names, parameters = zip(*case.model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    found = {name: g for name, g in zip(names, gradients, strict=True) if g is not None}
    return Update(factors, float(policy.detach()), found)


def k2(log_prob: Tensor, teacher: Tensor) -> Tensor:
    """(s - t)^2 / 2 of a token, linear beyond ``MAX_GAP``; 0 for tokens without a teacher's value."""
    gap = torch.where(teacher.isnan(), 0.0, log_prob - teacher.nan_to_num())
    return torch.where(gap.abs() <= MAX_GAP, gap**2 / 2, MAX_GAP * (gap.abs() - MAX_GAP / 2))


def ppo(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    """The clipped loss of a token, with verl's dual clip for negative advantages."""
    ratio = (log_prob - old_log_prob).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    return torch.where(advantages < 0, torch.minimum(clipped, -advantages * DUAL_CLIP), clipped)


def assert_same(found: Update, demanded: Update, *, tolerance: float = 1e-5) -> None:
    """Check equality within ``tolerance``, relative to the greatest value of the same kind."""
    assert found.factor.keys() == demanded.factor.keys()
    for token, value in demanded.factor.items():
        assert math.isclose(found.factor[token], value, rel_tol=tolerance, abs_tol=0.0), (token, found, demanded)
    assert math.isclose(found.loss, demanded.loss, rel_tol=tolerance, abs_tol=tolerance * 0.1)
    scale = max(float(gradient.abs().max()) for gradient in demanded.gradients.values())
    assert found.gradients.keys() == demanded.gradients.keys()
    for name, gradient in demanded.gradients.items():
        error = float((found.gradients[name].double() - gradient).abs().max()) / scale
        assert error < tolerance, f"{name}: relative error {error:.2g}"


def measure_errors(found: Update, demanded: Update) -> dict[str, float]:
    """Relative errors: the largest of a token's factor, that of the loss, and that of all gradients by their norm.

    Args:
        found: of a device; float32 gradients on any.
    """
    assert found.factor.keys() == demanded.factor.keys()
    factors = [abs(found.factor[token] - value) / (abs(value) or 1.0) for token, value in demanded.factor.items()]
    ours, theirs = (
        torch.cat([update.gradients[name].double().cpu().flatten() for name in sorted(demanded.gradients)])
        for update in (found, demanded)
    )
    return {
        "factor": max(factors),
        "loss": abs(found.loss - demanded.loss) / abs(demanded.loss),
        "gradient": float((ours - theirs).norm() / theirs.norm()),
    }


def fingerprint(update: Update) -> list[float]:
    """Numbers that distinguish updates: loss, sum of factors, and moments of the gradients."""
    numbers = [update.loss, sum(update.factor.values())]
    for name in sorted(update.gradients):
        if "layers.1" in name or "lm_head" in name:
            gradient = update.gradients[name].double().flatten()
            numbers += [float(gradient.norm()), float(gradient @ torch.linspace(-1, 1, len(gradient)).double())]
    return numbers
