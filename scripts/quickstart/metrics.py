"""What verl's file logger wrote, read while it is being written."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REWARD = ("critic/rewards/mean", "critic/score/mean")
KL = ("offpolicy/kl/k3",)
ESS = ("offpolicy/weight/ess",)
KEPT = ("offpolicy/keep/token_share",)
PROVED = "offpolicy/live/proved"
SECONDS = ("timing_s/step",)


def pick(data: dict[str, Any], keys: tuple[str, ...]) -> float:
    """The first of these keys that is present; NaN when none is."""
    for key in keys:
        if data.get(key) is not None:
            return float(data[key])
    return math.nan


def heldout_score(data: dict[str, Any]) -> float | None:
    """verl's own validation score (`val-core/<source>/<name>/mean@1`); None when the step was not validated."""
    found = [value for key, value in data.items() if key.startswith("val-core/") and key.endswith("/mean@1")]
    return float(found[0]) if found else None


@dataclass
class History:
    """Metrics by step, in the order in which they were written."""

    records: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """Steps at which the policy was updated."""
        return [step for step, data in self.records if not math.isnan(pick(data, REWARD))]

    def series(self, keys: tuple[str, ...]) -> list[float]:
        """One value for each of `steps`, NaN where it was not logged."""
        return [pick(data, keys) for _, data in self.records if not math.isnan(pick(data, REWARD))]

    @property
    def heldout(self) -> list[tuple[int, float]]:
        """(step, score) of each validation."""
        scores = [(step, heldout_score(data)) for step, data in self.records]
        return [(step, score) for step, score in scores if score is not None]

    @property
    def proved(self) -> bool:
        """The worker's gradient was seen to carry the correction."""
        return any(data.get(PROVED) == 1.0 for _, data in self.records)


class MetricsFile:
    """Reads a JSONL file in instalments."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[tuple[int, dict[str, Any]]]:
        """The (step, metrics) lines that have been completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = [json.loads(line) for line in whole.splitlines()]
        return [(line["step"], line["data"]) for line in lines]
