"""Score centering of a micro-batch: log-probs of the sampler's K likeliest tokens, and the term computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..correction import CorrectionSpec, Statistic, StepStage
from ..correction.centering import compute_centering, compute_coefficients, compute_drift
from ..correction.rules import centers_mask, find_unknown
from ..correction.statistics import build_mean
from ..correction.validation import rename_for_metrics
from .micro_batch import MicroBatch, read_scale
from .padding import flatten

LOG_PROBS = "offpolicy_likeliest_log_probs"
"""Key of a model output: (tokens, K) log pi of the likeliest tokens, nested by row. Each value is stored one position
before its token."""
ROLLOUT_LOG_PROBS = "offpolicy_likeliest_rollout_log_probs"
"""Key of a model output: log mu of the likeliest tokens, 0 or less, -inf where there is no token."""


@dataclass(frozen=True)
class LikeliestTokens:
    """Log-probs of the likeliest tokens at each response position.

    Attributes:
        log_prob: (B, T, K) log pi, differentiable; 0 where there is no token.
        rollout_log_prob: (B, T, K) log mu, -inf where there is no token, and on padding.
    """

    log_prob: Tensor
    rollout_log_prob: Tensor
    _known: dict[CorrectionSpec, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, batch: MicroBatch) -> LikeliestTokens:
        """Read the likeliest tokens of a micro-batch.

        Raises:
            KeyError: the engine did not compute them.
        """
        return cls(
            _read(batch.model_output, LOG_PROBS, batch),
            _read(batch.model_output, ROLLOUT_LOG_PROBS, batch).masked_fill(
                ~batch.response_mask[..., None], float("-inf")
            ),
        )

    def coefficients(self, spec: CorrectionSpec) -> Tensor:
        """Compute m(v) - a p(v), only once per correction: (B, T, K) float64, see ``correction.centering``."""
        if spec not in self._known:
            shape = self.log_prob.shape
            flat = (each.reshape(-1, shape[-1]) for each in (self.log_prob, self.rollout_log_prob))
            self._known[spec] = compute_coefficients(spec, *flat).view(shape)
        return self._known[spec]


def _read(output: Mapping[str, Any], key: str, batch: MicroBatch) -> Tensor:
    if key not in output or batch.layout is None:
        raise KeyError(
            f"{key} is not in the model's output: this worker does not compute the log-probs of the K likeliest tokens "
            f"that score centering needs. Set correction.centering=null."
        )
    return batch.layout.responses_of(flatten(output[key]))


def compute_centering_term(
    spec: CorrectionSpec, batch: MicroBatch, step: StepStage, likeliest: LikeliestTokens
) -> Tensor:
    """Compute A C of each token, (B, T), differentiable; 0 where a mask that is not part of C drops the token.

    Args:
        step: the decisions of ``spec`` on the batch.
    """
    coefficients = likeliest.coefficients(spec)
    centred = {f"masks.{name}" for name, mask in spec.masks if centers_mask(mask)} | set(spec.all_weights)
    # Tokens without mu or pi_old are excluded from C, as they are from the policy term.
    kept = batch.policy_mask & torch.isfinite(batch.rollout_log_prob + batch.old_log_prob)
    for part, drop in step.rejected.items():
        kept = kept if part in centred else kept & ~drop
    factor = torch.where(kept, batch.advantages.detach(), 0.0)
    if spec.recounts:
        factor = factor * read_scale(spec, batch)[:, None]
    term = compute_centering(likeliest.log_prob, coefficients)
    return factor.to(term.dtype) * term


@torch.no_grad()
def measure_drift(
    spec: CorrectionSpec, shadows: Mapping[str, CorrectionSpec], batch: MicroBatch, likeliest: LikeliestTokens
) -> dict[str, Statistic]:
    """Measure the drift without centering, for the correction and for each shadow that decides by token."""
    specs = {"drift": spec}
    known = {name: shadow for name, shadow in shadows.items() if not find_unknown(shadow)}
    specs |= {f"drift/{rename_for_metrics(name)}": shadow for name, shadow in known.items()}
    count = batch.policy_mask.sum(dtype=torch.float64)
    found = {}
    for name, each in specs.items():
        drift = compute_drift(likeliest.log_prob, likeliest.coefficients(each))
        found[f"{name}/mean"] = build_mean(torch.where(batch.policy_mask, drift, 0.0).sum(), count)
    return found
