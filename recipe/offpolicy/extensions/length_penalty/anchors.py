"""Anchor lengths, frozen when a prompt is first solved reliably, and statistics of length by correctness."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

Answer = tuple[bool, float]
"""Whether the answer is right, and its number of response tokens."""


@dataclass(frozen=True)
class Anchor:
    """A frozen anchor.

    Attributes:
        length: mean tokens of the right answers in the window, at least 1.
        step: step at which it was frozen.
        answers: number of right answers in the mean.
    """

    length: float
    step: int
    answers: int


@dataclass
class Anchors:
    """Anchors of a run, by prompt or by data source.

    A prompt's answers are kept, step by step, until the share of right answers among at least ``min_samples`` answers
    exceeds ``pass_rate``. Then the anchor is frozen for good and the answers are dropped. The order of answers within a
    step has no influence, because whole steps enter and leave the window.

    Attributes:
        pass_rate: in (0, 1), exclusive.
        min_samples: smallest number of answers for which the share counts.
        window: smallest number of answers that are kept, if available.
    """

    pass_rate: float
    min_samples: int
    window: int
    frozen: dict[str, Anchor] = field(default_factory=dict)
    _open: dict[str, list[list[Answer]]] = field(default_factory=dict)

    def add(self, step: int, answers: Iterable[tuple[str, bool, float]]) -> int:
        """Add one step's answers as (prompt, right, tokens); return the number of newly frozen anchors."""
        by_prompt: dict[str, list[Answer]] = {}
        for name, right, tokens in answers:
            if name not in self.frozen:
                by_prompt.setdefault(name, []).append((right, tokens))
        before = len(self.frozen)
        for name, new in by_prompt.items():
            steps = self._open.setdefault(name, [])
            steps.append(new)
            while sum(map(len, steps)) - len(steps[0]) >= self.window:
                steps.pop(0)
            lengths = [tokens for each in steps for right, tokens in each if right]
            total = sum(map(len, steps))
            if total >= self.min_samples and len(lengths) > self.pass_rate * total:
                # Sums of rounded floats depend on their order.
                length = max(math.fsum(lengths) / len(lengths), 1.0)  # empty answers may be right
                self.frozen[name] = Anchor(length, step, len(lengths))
                del self._open[name]
        return len(self.frozen) - before

    def length_of(self, name: str) -> float | None:
        """Return the anchor of a prompt; None if it has none."""
        anchor = self.frozen.get(name)
        return None if anchor is None else anchor.length

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"frozen": {name: asdict(anchor) for name, anchor in self.frozen.items()}, "open": self._open}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``to_json`` returned."""
        self.frozen = {name: Anchor(**values) for name, values in state["frozen"].items()}
        self._open = {
            name: [[(bool(right), float(tokens)) for right, tokens in step] for step in steps]
            for name, steps in state["open"].items()
        }


EASY, HARD = 0.9, 0.1
"""Smallest share of right answers in an easy group, and largest in a hard group."""
CLASSES = ("right", "wrong", "easy", "hard")


def summarize_lengths(tokens: Tensor, right: Tensor, groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Compute mean, median and 90th percentile of length for right and wrong answers, easy and hard prompts.

    Args:
        tokens: (S,) response tokens of each session.
        right: (S,) bool.
        groups: sessions of each group.

    Returns:
        ``CLASS/mean``, ``CLASS/p50``, ``CLASS/p90``, NaN for a class without sessions, ``CLASS/sequences``, and
        ``correlation`` of length and correctness within groups, NaN if either does not vary.
    """
    members = {name: torch.zeros(len(tokens), dtype=torch.bool) for name in ("easy", "hard")}
    counted = torch.zeros(len(tokens), dtype=torch.bool)
    length, mark = tokens.double().clone(), right.double()
    for sessions in groups.values():
        at = torch.tensor(sessions)
        share = float(right[at].double().mean())
        counted[at] = True
        members["easy"][at] = share >= EASY
        members["hard"][at] = share <= HARD
        length[at] -= length[at].mean()
        mark[at] -= right[at].double().mean()
    chosen = {"right": right.bool() & counted, "wrong": ~right.bool() & counted} | members
    found: dict[str, float] = {}
    for name in CLASSES:
        values = tokens[chosen[name]].double()
        found[f"{name}/sequences"] = float(len(values))
        found[f"{name}/mean"] = float(values.mean()) if len(values) else math.nan
        for share in (50, 90):
            found[f"{name}/p{share}"] = float(values.quantile(share / 100)) if len(values) else math.nan
    length, mark = length[counted], mark[counted]
    scale = float(length.square().sum() * mark.square().sum()) ** 0.5
    return found | {"correlation": float((length * mark).sum()) / scale if scale > 0 else math.nan}
