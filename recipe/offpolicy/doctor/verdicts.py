"""The verdicts on a launch, as they are shown; this module imports neither verl nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .program import Launch

if TYPE_CHECKING:
    from verl_patches.execution_path import LivePath

    from ..correction import Problem

State = Literal["OK", "NO-OP", "ERROR"]
_STATUS: dict[State, int] = {"OK": 0, "NO-OP": 1, "ERROR": 2}


@dataclass(frozen=True)
class VerdictRow:
    """One configured part and its problems.

    Attributes:
        name: name of the part, such as ``weight``, ``masks.gsm`` or ``rollout_correction.rollout_is``.
        meaning: the configured values in a few words; "" for a row that was created only for a problem.
        problems: problems that have a verdict, the worst first.
    """

    name: str
    meaning: str
    problems: tuple[Problem, ...] = ()

    @property
    def verdict(self) -> State:
        """The worst verdict of the row's problems; OK if there are none."""
        verdicts = {problem.verdict for problem in self.problems}
        return "ERROR" if "ERROR" in verdicts else "NO-OP" if "NO-OP" in verdicts else "OK"


@dataclass(frozen=True)
class Diagnosis:
    """The result of the doctor on one launch.

    Attributes:
        path: release, trainer and worker; None if the keys from which they are determined have no values.
        notes: remarks that change no verdict.
        said: messages that the launch itself would print, such as the choice of ``correction=auto``.
        fingerprint: fingerprint of this package's correction.
        error: why no configuration could be composed; "" if it was composed.
        headline: the active correction, or UNCORRECTED; "" without a configuration.
    """

    launch: Launch
    path: LivePath | None = None
    rows: tuple[VerdictRow, ...] = ()
    notes: tuple[Problem, ...] = ()
    said: tuple[str, ...] = ()
    fingerprint: int | None = None
    error: str = ""
    headline: str = ""

    @property
    def verdict(self) -> State:
        """The worst verdict of all rows; ERROR if there is no configuration."""
        if self.error:
            return "ERROR"
        return max((row.verdict for row in self.rows), key=_STATUS.__getitem__, default="OK")

    @property
    def status(self) -> int:
        """The exit status: 0 OK or nothing configured, 1 NO-OP, 2 ERROR."""
        return _STATUS[self.verdict]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems of the rows, without duplicates."""
        return tuple(dict.fromkeys(problem for row in self.rows for problem in row.problems))
