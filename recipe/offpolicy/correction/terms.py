"""Parts that act outside the policy term: the weight of the KL loss, and the penalty on the squared log-ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .problem import SpecError
from .validation import read_choice, read_number, read_ratio_bounds, require_keys

KlRatio = Literal["full", "ppo"]


@dataclass(frozen=True)
class KlWeightSpec:
    """A ratio that multiplies each token's KL estimate in the loss, with its gradient.

    Attributes:
        ratio: ``full`` pi / mu, ``ppo`` pi / pi_old.
        upper: limit, > 1; ratios above it are replaced with this constant. None for no limit.
    """

    ratio: KlRatio
    upper: float | None = None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, key: str = "correction.kl_weight") -> KlWeightSpec:
        """Build from plain values; ``key`` is the Hydra path that error messages show.

        Raises:
            SpecError: a value is malformed.
        """
        require_keys(mapping, {"ratio", "upper"}, key)
        _, upper = read_ratio_bounds({"lower": None, **mapping}, key)
        if upper is not None and upper <= 1:
            raise SpecError(
                "it would act even if the two policies agree.",
                f"Set {key}.upper=2.0 for example, or null.",
                key=f"{key}.upper",
                value=upper,
                proposed={f"{key}.upper": 2.0},
            )
        return cls(read_choice(mapping, "ratio", KlRatio, key), upper)

    def to_mapping(self) -> dict[str, Any]:
        """Return the plain values from which ``from_mapping`` builds an equal spec."""
        return asdict(self)


PenaltyRatio = Literal["full", "ppo"]


@dataclass(frozen=True)
class PenaltySpec:
    """A penalty on (log r)^2 of every valid token, neither weighted nor masked.

    It is Kimi k1.5's l2 term (Kimi Team 2025, eq. 3, with coefficient tau / 2 on pi / mu), and prime-rl's ``kl_tau``.

    Attributes:
        ratio: ``full`` pi / mu, ``ppo`` pi / pi_old.
        coefficient: factor, > 0, that multiplies the loss's aggregate of (log r)^2.
    """

    ratio: PenaltyRatio
    coefficient: float

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, key: str = "correction.penalty") -> PenaltySpec:
        """Build from plain values; ``key`` is the Hydra path that error messages show.

        Raises:
            SpecError: a value is malformed.
        """
        require_keys(mapping, {"ratio", "coefficient"}, key)
        coefficient = read_number(mapping["coefficient"], f"{key}.coefficient", nullable=False)
        if coefficient is None or coefficient <= 0:
            raise SpecError(
                "expected a number > 0, by which the mean of (log r)^2 is multiplied.",
                f"Set {key}.coefficient=0.001 for example, or {key}=null.",
                key=f"{key}.coefficient",
                value=mapping["coefficient"],
                proposed={f"{key}.coefficient": 0.001},
            )
        return cls(read_choice(mapping, "ratio", PenaltyRatio, key), coefficient)

    def to_mapping(self) -> dict[str, Any]:
        """Return the plain values from which ``from_mapping`` builds an equal spec."""
        return asdict(self)


def compute_squared_log_ratio(log_prob: Tensor, other: Tensor, response_mask: Tensor) -> Tensor:
    """Compute (log pi - log other)^2 per token, 0 outside the mask or if ``other`` is not finite; differentiable in pi.

    Args:
        log_prob: (B, T) log pi.
        other: (B, T) log-probs of the penalty's reference policy, detached here.
        response_mask: (B, T) bool.

    Example:
        >>> pi, mu = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-3.0, float("nan")]])
        >>> compute_squared_log_ratio(pi, mu, torch.ones(1, 2, dtype=torch.bool)).tolist()
        [[4.0, 0.0]]
    """
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    other = other.detach().to(dtype)
    valid = response_mask & torch.isfinite(other)
    # Tokens are selected before the subtraction, so that no gradient passes through non-finite values.
    return (log_prob.to(dtype) - torch.where(valid, other, log_prob.detach().to(dtype))).square() * valid
