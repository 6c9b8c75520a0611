"""Lengths, anchors and penalties of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch_view import BatchView
from ..sessions import Sessions, identify_prompts, read_sessions
from .evidence import Row
from .penalties import Anchors, compare_rewards, penalties
from .settings import LengthSettings, read_length


@dataclass(frozen=True)
class Measured:
    """The values of one batch, with S sessions, that the penalty uses.

    Attributes:
        right: (S,) bool.
        anchors: (S,) lengths with which sessions are compared.
        new: number of anchors that this batch has frozen.
        groups: sessions of each group, without silent sessions.
        equal: groups whose rewards are equal within float32 rounding.
        penalty: (S,) float64, with warm-up; 0 outside of groups.
        weight: factor of the warm-up.
    """

    sessions: Sessions
    right: Tensor
    anchors: list[float | None]
    new: int
    groups: dict[str, list[int]]
    equal: set[str]
    penalty: Tensor
    weight: float

    def rows(self, members: Sequence[int]) -> list[Row]:
        """Collect the rows of one group for the second implementation."""
        tokens, scores, right = (each.tolist() for each in (self.sessions.tokens, self.sessions.scores, self.right))
        return [Row(tokens[s], right[s], scores[s], self.anchors[s]) for s in members]


def measure(
    section: str, settings: LengthSettings, anchors: Anchors, batch: BatchView, most_tokens: int | None
) -> Measured:
    """Measure a batch, after adding its answers to the anchors.

    Raises:
        ValueError: a row has no reference length.
    """
    sessions = read_sessions(batch, most_tokens)
    right = sessions.find_right(settings.correct_at_least)
    groups = sessions.groups()
    differ = compare_rewards(sessions.scores, groups)
    held, new = _find_anchors(section, settings, anchors, batch, sessions, right)
    weight = settings.compute_warmup(batch.step)
    penalty = torch.zeros_like(sessions.tokens)
    for name, members in groups.items():
        share = weight * (differ[name] if settings.zero_variance == "skip" else 1.0)
        if settings.kind == "none" or share == 0:
            continue
        at = torch.tensor(members)
        found = penalties(
            settings.kind, sessions.tokens[at], right[at], coefficient=settings.coefficient, anchor=held[members[0]]
        )
        penalty[at] = share * (found if settings.most is None else found.clamp(-settings.most, settings.most))
    if settings.applies_to == "correct":
        penalty = torch.where(right, penalty, 0.0)
    equal = {name for name, certainty in differ.items() if not certainty}
    return Measured(sessions, right, held, new, groups, equal, penalty, weight)


def _find_anchors(
    section: str, settings: LengthSettings, anchors: Anchors, batch: BatchView, sessions: Sessions, right: Tensor
) -> tuple[list[float | None], int]:
    """Find the length with which each session is compared, and count the anchors that this batch freezes."""
    count = len(sessions.last)
    if settings.kind == "reference":
        return _read_references(section, settings.reference, batch, sessions), 0
    if settings.kind != "anchor":
        return [None] * count, 0
    if settings.anchor.per == "source":
        sources = batch.rows("data_source")["data_source"]
        names = [str(sources[row]) for row in sessions.last.tolist()]
    else:
        names = identify_prompts(batch, sessions)
    new = anchors.add(batch.step, zip(names, right.tolist(), sessions.tokens.tolist(), strict=True))
    return [anchors.length_of(name) for name in names], new


def _read_references(
    section: str, reference: float | str | None, batch: BatchView, sessions: Sessions
) -> list[float | None]:
    """Read the reference length of each session.

    Raises:
        ValueError: a row of the data set has no reference length.
    """
    if not isinstance(reference, str):
        return [reference] * len(sessions.last)
    infos = batch.rows("extra_info")["extra_info"]
    found: list[float | None] = []
    for row in sessions.last.tolist():
        if (length := read_length(infos[row], reference)) is None:
            raise ValueError(
                f"{section}.reference={reference}: the extra_info of sequence {row} in step {batch.step} is "
                f"{infos[row]!r:.200}, and has no length above 0 under this name. Fix: fill the column, or set "
                f"{section}.reference to a number of tokens."
            )
        found.append(length)
    return found
