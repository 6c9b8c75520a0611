"""Importance weight of KL as a loss, which makes its gradient that of the reverse KL off policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .problem import SpecError
from .validation import read_choice, read_ratio_bounds, require_keys

KlRatio = Literal["full", "ppo"]


@dataclass(frozen=True)
class KlWeightSpec:
    """A ratio that multiplies each token's KL estimate in the loss, with its gradient.

    Attributes:
        ratio: ``full`` pi / mu, ``ppo`` pi / pi_old.
        upper: greatest ratio, > 1, beyond which it is a constant; None for any.
    """

    ratio: KlRatio
    upper: float | None = None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, key: str = "correction.kl_weight") -> KlWeightSpec:
        """Build from plain values; ``key`` is the Hydra path that error messages show.

        Raises:
            SpecError: anything malformed.
        """
        require_keys(mapping, {"ratio", "upper"}, key)
        _, upper = read_ratio_bounds({"lower": None, **mapping}, key)
        if upper is not None and upper <= 1:
            raise SpecError(
                "it would bind where the two policies agree.",
                f"Set {key}.upper=2.0 for example, or null.",
                key=f"{key}.upper",
                value=upper,
                proposed={f"{key}.upper": 2.0},
            )
        return cls(read_choice(mapping, "ratio", KlRatio, key), upper)

    def to_mapping(self) -> dict[str, Any]:
        """Return the plain values from which ``from_mapping`` builds an equal spec."""
        return asdict(self)
