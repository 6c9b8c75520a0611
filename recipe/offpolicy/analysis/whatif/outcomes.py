"""Results of a replay, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .agreement import Agreement
from .candidates import Candidate
from .fidelity import Fidelity
from .measures import CorrectionMeasures, Sums, TurnShare, compute_measures, compute_turn_shares


@dataclass(frozen=True)
class CorrectionOutcome:
    """Effect of one correction on the recorded steps.

    Attributes:
        candidate: which one.
        overall: over everything.
        groups: by ``length/<bucket>``, ``advantage/<sign>``, ``staleness/<group>``, those with a row.
        turns: by ``turn/<number>``, those with a token.
        steps: step -> over that step.
    """

    candidate: Candidate
    overall: CorrectionMeasures
    groups: Mapping[str, CorrectionMeasures]
    turns: Mapping[str, TurnShare]
    steps: Mapping[int, CorrectionMeasures]


@dataclass(frozen=True)
class Study:
    """The result of a replay.

    Attributes:
        directory: of the recording.
        steps: that were replayed.
        rows, tokens: response tokens of these steps, and rows with one.
        outcomes: of each correction that could be replayed.
        failures: label -> why it could not.
        agreement: between ``outcomes``, in their order.
        fidelity: of the recorded correction's replay.
        notes: what limits the figures, a sentence each.
    """

    directory: str
    steps: tuple[int, ...]
    rows: int
    tokens: int
    outcomes: tuple[CorrectionOutcome, ...]
    failures: Mapping[str, str]
    agreement: Agreement
    fidelity: Fidelity
    notes: tuple[str, ...]


@dataclass
class RunningOutcome:
    """Accumulated sums of one correction while steps are replayed."""

    candidate: Candidate
    steps: dict[int, Sums] = field(default_factory=dict)
    total: Sums | None = None
    names: tuple[str, ...] = ()

    def add(self, step: int, names: tuple[str, ...], sums: Sums) -> None:
        self.names = names
        # A step comes once for each correction that acted in it.
        self.steps[step] = sums[0] + self.steps.get(step, 0)
        self.total = sums if self.total is None else self.total + sums

    def build_outcome(self) -> CorrectionOutcome:
        assert self.total is not None, "a step was added"
        groups = {name: compute_measures(sums) for name, sums in zip(self.names, self.total, strict=True)}
        # The group "" holds all rows.
        overall = groups.pop("")
        turns = compute_turn_shares(self.total[0])
        return CorrectionOutcome(
            self.candidate,
            overall,
            {name: group for name, group in groups.items() if group.rows},
            {name: share for name, share in turns.items() if share.tokens},
            {step: compute_measures(sums) for step, sums in self.steps.items()},
        )
