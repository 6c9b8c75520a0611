"""Result of the doctor's command: exit status and printed text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Answer(NamedTuple):
    status: int
    printed: str

    @property
    def json(self) -> Any:
        return json.loads(self.printed)

    def verdicts(self) -> dict[str, str]:
        return {row["name"]: row["verdict"] for row in self.json["corrections"]}

    def overrides(self) -> list[str]:
        return [
            each for row in self.json["corrections"] for problem in row["problems"] for each in problem["overrides"]
        ]


Ask = Callable[..., Answer]
