"""Score centering by enumeration of the vocabulary, in float64, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.correction.centering import compute_centering, compute_coefficients, compute_drift
from recipe.offpolicy.proof.term_trials import expect_coefficients
from tests.support.corrections import GSM

VOCABULARY, POSITIONS = 40, 200


def mask(aggregate: str, lower: float | None, upper: float | None, **keys: Any) -> dict[str, Any]:
    plain = dict(ratio="rollout", level="token", aggregate=aggregate, lower=lower, upper=upper, when="any")
    return {"masks": {"tm": plain | keys}}


def weight(kind: str, lower: float | None, upper: float | None, **keys: Any) -> dict[str, Any]:
    return {"weight": dict(level="token", kind=kind, lower=lower, upper=upper) | keys}


FACTORS: dict[str, tuple[dict[str, Any], Any]] = {
    "none": ({}, lambda r: torch.ones_like(r)),
    "truncate": (weight("truncate", None, 1.3), lambda r: r.clamp(max=1.3)),
    "clip": (weight("clip", 0.7, 1.3), lambda r: r.clamp(0.7, 1.3)),
    "reject": (weight("reject", 0.5, 2.0), lambda r: r * ((r >= 0.5) & (r <= 2.0))),
    "of pi": (weight("clip", 0.7, 1.3, ratio="full"), lambda r: r.clamp(0.7, 1.3)),
    "gamma": ({"weight": dict(level="token", kind="gamma", power=2.0, rate=3.0)}, lambda r: (3 * (1 - r)).exp() * r**2),
    "mask": (mask("product", 0.5, 2.0), lambda r: ((r >= 0.5) & (r <= 2.0)).double()),
    "k1": (mask("k1_sum", -0.5, 0.5), lambda r: (r.log().abs() <= 0.5).double()),
    "k2": (mask("k2_sum", None, 0.1), lambda r: (r.log() ** 2 / 2 <= 0.1).double()),
    "k3": (mask("k3_sum", None, 0.1), lambda r: (r - 1 - r.log() <= 0.1).double()),
    "tv": (mask("tv_sum", None, 0.2), lambda r: ((r - 1).abs() / 2 <= 0.2).double()),
    "both": (
        weight("truncate", None, 1.3) | mask("product", 0.5, 2.0),
        lambda r: r.clamp(max=1.3) * ((r >= 0.5) & (r <= 2.0)),
    ),
    "by a name": (
        {"weights": {"w": dict(level="token", kind="reject", lower=0.7, upper=1.3, when="any")}},
        lambda r: r * ((r >= 0.7) & (r <= 1.3)),
    ),
    "a sequence's mask": ({"masks": {"gsm": GSM}}, lambda r: torch.ones_like(r)),
}


def draw(spread: float, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Draw logits of the policy, and log q of a sampler with added noise."""
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(POSITIONS, VOCABULARY, generator=generator, dtype=torch.float64)
    moved = logits + noise * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    return logits, moved.log_softmax(-1)


def enumerate_score(factor: Any, logits: Tensor, log_q: Tensor) -> Tensor:
    """E_q[f grad log p] with respect to the logits: sum_v q(v) f(v) (1[u = v] - p(u))."""
    log_p = logits.log_softmax(-1)
    weighed = log_q.exp() * factor((log_p - log_q).exp())
    return weighed - weighed.sum(-1, keepdim=True) * log_p.exp()


def centre(plain: dict[str, Any], logits: Tensor, log_q: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of C with respect to the logits, and the drift of each position."""
    leaf = logits.clone().requires_grad_()
    values, ids = log_q.topk(size)
    log_p = leaf.log_softmax(-1).gather(-1, ids)
    coefficients = compute_coefficients(CorrectionSpec.from_mapping({**plain, "centering": size}), log_p, values)
    gradient = torch.autograd.grad(compute_centering(log_p, coefficients).sum(), leaf)[0]
    return gradient, compute_drift(log_p, coefficients)


@pytest.mark.parametrize("name", FACTORS)
def test_with_the_whole_vocabulary_the_centred_score_has_mean_zero(name: str) -> None:
    plain, factor = FACTORS[name]
    logits, log_q = draw(1.0)
    gradient, drift = centre(plain, logits, log_q, VOCABULARY)
    score = enumerate_score(factor, logits, log_q)
    assert (gradient - score).abs().max() < 1e-12
    assert torch.allclose(drift, score.abs().sum(-1) / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("size", [1, 8, VOCABULARY])
def test_the_proof_expects_what_the_loss_computes(name: str, size: int) -> None:
    plain, _ = FACTORS[name]
    logits, log_q = draw(1.0)
    values, ids = log_q.topk(size)
    log_p = logits.log_softmax(-1).gather(-1, ids)
    values[3:5, size // 2 :] = -torch.inf
    parts = CorrectionSpec.from_mapping(plain)
    found = compute_coefficients(parts, log_p, values)
    (weight,) = parts.all_weights.values() or (None,)
    by_token = CorrectionSpec(weight=weight, masks=tuple(m for m in parts.masks if m[1].level == "token"))
    assert torch.allclose(found, expect_coefficients(by_token, log_p, values), rtol=0, atol=1e-12)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no number": ({"centering": "all"}, "correction.centering"),
    "nothing": ({"centering": 0}, "correction.centering"),
    "a switch": ({"centering": True}, "correction.centering"),
    "by sequence": (weight("truncate", None, 2.0, level="sequence"), "correction.weight.level"),
    "by prefix": (weight("truncate", None, 2.0, level="prefix"), "correction.weight.level"),
    "normalized": (weight("truncate", None, 2.0, normalize=True), "correction.weight.normalize"),
    "one sign": (weight("truncate", None, 2.0, when="negative"), "correction.weight.when"),
    "by age": (weight("truncate", None, 2.0, by_staleness=[1.0, 2.0]), "correction.weight.by_staleness"),
    "of both probabilities": (mask("binary_kl", None, 0.1), "correction.masks.tm.aggregate"),
    "of pi_old": (mask("product", 0.5, 2.0, ratio="ppo"), "correction.masks.tm.ratio"),
    "outward": (mask("product", 0.5, 2.0, when="outward"), "correction.masks.tm.when"),
    "nothing to centre": (weight("truncate", None, None), "correction.centering"),
    "bypass": ({"proximal": "bypass"}, "correction.proximal"),
    "support": ({"support": "engine"}, "correction.support"),
    "truncated": ({"allow_truncated_sampling": True}, "correction.allow_truncated_sampling"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_c_cannot_contain_is_refused_by_its_key(name: str) -> None:
    plain, key = REFUSED[name]
    with pytest.raises(SpecError) as refused:
        CorrectionSpec.from_mapping({"centering": 20, **plain})
    (problem,) = refused.value.problems if hasattr(refused.value, "problems") else (refused.value,)
    assert getattr(problem, "key", key) == key
    assert str(refused.value).startswith(key)
