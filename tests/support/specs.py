"""Corrections that several tests share, as plain mappings."""

from __future__ import annotations

from typing import Any

TIS_TOKEN: dict[str, Any] = {"level": "token", "kind": "truncate", "lower": None, "upper": 1.2}
GSM: dict[str, Any] = {
    "ratio": "rollout",
    "level": "sequence",
    "aggregate": "geometric",
    "lower": 0.9,
    "upper": 1.1,
    "when": "any",
}
OPSM: dict[str, Any] = {
    "ratio": "full",
    "level": "sequence",
    "aggregate": "geometric",
    "delta": 0.05,
    "when": "negative",
}
STALENESS: dict[str, Any] = OPSM | {"ratio": "ppo"}
BATCH_WIDE: dict[str, Any] = {
    "weight": TIS_TOKEN | {"normalize": True},
    "masks": {
        "gsm": GSM,
        "m2po": {"ratio": "rollout", "level": "token", "aggregate": "second_moment", "budget": 0.02, "when": "any"},
    },
    "denominator": "kept",
}
"""Every batch-level constant."""
STACK: dict[str, Any] = {"weight": TIS_TOKEN, "masks": {"gsm": GSM, "opsm": OPSM}}
