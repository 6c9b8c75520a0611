"""Factor of the base loss in a token's gradient, which corrections multiply: PPO's ratio and its clip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...correction.ratios import clamp_and_exp


@dataclass(frozen=True)
class BaseLoss:
    """The run's ``actor.policy_loss.loss_mode`` and clips, as recorded.

    Attributes:
        name: the mode; empty where the recording does not say.
        low, high: PPO's clip, to 1 - low and 1 + high; None for no clip.
        dual: upper clip for negative advantages (dual-clip PPO, Ye et al. 2020); None for none.
    """

    name: str = ""
    low: float | None = None
    high: float | None = None
    dual: float | None = None

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> BaseLoss:
        """Read the base loss from a recording's card; clips are read for ``vanilla`` alone."""
        actor = _mapping(_mapping(_mapping(card.get("config")).get("actor_rollout_ref")).get("actor"))
        name = _mapping(actor.get("policy_loss")).get("loss_mode")
        if not isinstance(name, str):
            return cls()
        if name != "vanilla":
            return cls(name)
        both = actor.get("clip_ratio")
        sides = (actor.get(f"clip_ratio_{side}") for side in ("low", "high"))
        # verl takes clip_ratio where a side is not set.
        low, high = (both if side is None else side for side in sides)
        return cls(name, _number(low), _number(high), _number(actor.get("clip_ratio_c")))

    def compute_factor(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """Compute r = pi / pi_old, 0 where the clip leaves no gradient; 1 under ``gpg``, which has no ratio.

        PPO's clip stops the gradient at r > 1 + high with A > 0 and at r < 1 - low with A < 0 (Schulman et al. 2017),
        the dual clip at r > dual with A < 0.

        Args:
            log_ratio: (B, W) float64, log(pi / pi_old).
            advantages: (B, W).
        """
        if self.name == "gpg":
            return torch.ones_like(log_ratio)
        ratio = clamp_and_exp(log_ratio)
        clipped = torch.zeros_like(ratio, dtype=torch.bool)
        if self.high is not None:
            clipped |= (advantages > 0) & (ratio > 1 + self.high)
        if self.low is not None:
            clipped |= (advantages < 0) & (ratio < 1 - self.low)
        if self.dual is not None:
            clipped |= (advantages < 0) & (ratio > self.dual)
        return ratio.masked_fill_(clipped, 0.0)

    @property
    def note(self) -> str:
        """The sentence on an unknown or unmodelled base loss; empty otherwise."""
        if self.name in ("vanilla", "gpg"):
            return ""
        if not self.name:
            return "The recording does not say which base loss was used: pi / pi_old is taken without a clip."
        return f"Base loss {self.name}: its own ratio and clip are not modelled, pi / pi_old is taken without a clip."


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
