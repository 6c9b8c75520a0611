"""Catalogue of the compared estimators, each as plain values of the Hydra node `correction`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Family = Literal["none", "token weight", "sequence weight", "mask", "both"]


@dataclass(frozen=True)
class Estimator:
    """Estimator in one row of the tables.

    Attributes:
        name: as printed; numbers are the bounds.
        correction: what ``CorrectionSpec.from_mapping`` reads.
        base: the loss that the correction multiplies: ``ppo``, whose gradient is (pi / pi_old) A grad log pi inside
            its clip range, or ``reinforce``, A grad log pi, for weights on pi / mu.
    """

    name: str
    family: Family
    correction: dict[str, Any] = field(default_factory=dict)
    base: Literal["ppo", "reinforce"] = "ppo"


def _weight(level: str, kind: str, lower: float | None, upper: float | None, **others: Any) -> dict[str, Any]:
    return {"weight": {"level": level, "kind": kind, "lower": lower, "upper": upper} | others}


def _mask(**mask: Any) -> dict[str, Any]:
    return {"ratio": "rollout", "level": "sequence", "when": "any"} | mask


def _one_mask(**mask: Any) -> dict[str, Any]:
    return {"masks": {"mask": _mask(**mask)}}


def _geometric(lower: float, upper: float) -> dict[str, Any]:
    return _one_mask(aggregate="geometric", lower=lower, upper=upper)


GSPO_CLIP = {
    "high": _mask(ratio="full", aggregate="geometric", lower=None, upper=1.2, when="positive"),
    "low": _mask(ratio="full", aggregate="geometric", lower=0.8, upper=None, when="negative"),
}
"""PPO's clip of the geometric mean ratio: no gradient where it binds, by the sign of the advantage.

GSPO's own gradient has a further 1 / T, the same for all rows here.
"""

PPO_CLIP: dict[str, dict[str, Any]] = {
    "high": {"level": "token", "aggregate": "any", "lower": None, "upper": 1.2, "when": "positive"},
    "low": {"level": "token", "aggregate": "any", "lower": 0.8, "upper": None, "when": "negative"},
}
"""The same by token; ``ratio`` is left to say whose clip it is."""

_VESPO = {
    when: {"level": "sequence", "kind": "gamma", "power": power, "rate": rate, "ratio": "full", "when": when}
    for when, power, rate in (("positive", 2.0, 3.0), ("negative", 3.0, 2.0))
}
NONE = Estimator("none", "none")
TOKEN_IS = Estimator("token IS", "token weight", _weight("token", "truncate", None, None))
SEQUENCE_IS = Estimator("sequence IS", "sequence weight", _weight("sequence", "truncate", None, None))
SEQUENCE_IS_FULL = Estimator(
    "sequence IS on pi / mu",
    "sequence weight",
    _weight("sequence", "truncate", None, None, ratio="full"),
    base="reinforce",
)
PREFIX_IS = Estimator("prefix IS", "token weight", _weight("prefix", "truncate", None, None))
MINPRO = Estimator("MinPRO", "token weight", _weight("prefix", "truncate", None, None, aggregate="minimum"))
SELF_NORMALISED = Estimator(
    "sequence IS, self-normalised", "sequence weight", _weight("sequence", "truncate", None, None, normalize=True)
)

ESTIMATORS: tuple[Estimator, ...] = (
    NONE,
    TOKEN_IS,
    Estimator("token TIS, cap 2", "token weight", _weight("token", "truncate", None, 2.0)),
    Estimator("token MIS [0.5, 2]", "token weight", _weight("token", "reject", 0.5, 2.0)),
    Estimator(
        "CISPO-like [0.8, 1.28]", "token weight", _weight("token", "clip", 0.8, 1.28, ratio="full"), base="reinforce"
    ),
    PREFIX_IS,
    Estimator("prefix TIS, cap 5", "token weight", _weight("prefix", "truncate", None, 5.0)),
    MINPRO,
    SEQUENCE_IS,
    SELF_NORMALISED,
    SEQUENCE_IS_FULL,
    Estimator("sequence TIS, cap 5", "sequence weight", _weight("sequence", "truncate", None, 5.0)),
    Estimator(
        "geometric weight", "sequence weight", _weight("sequence", "truncate", None, None, aggregate="geometric")
    ),
    Estimator(
        "GSPO-like [0.8, 1.2]",
        "both",
        _weight("sequence", "truncate", None, None, aggregate="geometric", ratio="full") | {"masks": GSPO_CLIP},
        base="reinforce",
    ),
    Estimator("VESPO", "sequence weight", {"weights": _VESPO}, base="reinforce"),
    Estimator("geometric mask [0.99, 1.01]", "mask", _geometric(0.99, 1.01)),
    Estimator("geometric mask [0.9, 1.1]", "mask", _geometric(0.9, 1.1)),
    Estimator("product mask [0.5, 2]", "mask", _one_mask(aggregate="product", lower=0.5, upper=2.0)),
    Estimator("outlier mask [0.5, 2]", "mask", _one_mask(aggregate="any", lower=0.5, upper=2.0)),
    Estimator("OPSM, delta=0.1", "mask", _one_mask(ratio="full", aggregate="geometric", delta=0.1, when="negative")),
    Estimator("token TIS + geometric mask", "both", _weight("token", "truncate", None, 2.0) | _geometric(0.9, 1.1)),
)
