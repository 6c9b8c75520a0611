"""The verdicts on a launch, and their output: a table on the terminal, or JSON; imports neither verl nor torch."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..fault_tolerance.redaction import redact, redact_text
from .program import Launch

if TYPE_CHECKING:
    from verl_patches.execution_path import LivePath

    from ..correction.problem import Problem

State = Literal["OK", "NO-OP", "ERROR"]
_STATUS: dict[State, int] = {"OK": 0, "NO-OP": 1, "ERROR": 2}


@dataclass(frozen=True)
class VerdictRow:
    """One configured part and its problems.

    Attributes:
        name: name of the part, such as ``weight``, ``masks.gsm`` or ``rollout_correction.rollout_is``.
        meaning: the configured values in a few words; "" for a row that exists only to show a problem.
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


SCHEMA = 2
_STYLES = {"OK": "bold green", "NO-OP": "bold yellow", "ERROR": "bold red", "NOTE": "dim"}


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Convert a diagnosis to plain values.

    ``schema``: 2. ``verdict``: OK, NO-OP or ERROR. ``exit_status``: 0, 1, 2. ``module``, ``origin``, ``arguments``: the
    launch. ``path``: release, trainer, worker, strategy, mode, or null. ``fingerprint``: of this package's correction,
    or null. ``headline``: the active correction, or UNCORRECTED; null if nothing was composed. ``error``: why no
    configuration was composed, or null. ``corrections``: name, meaning, verdict and problems of each. ``notes``:
    problems that change no verdict. ``said``: lines that the launch itself would print.

    For a script with several launches, in a loop or a function, the command prints the worst of these objects, with
    ``launches``: all of them in order.

    A problem has its key, value, verdict, reason, fix (a sentence) and overrides (a list, to be appended).
    """
    plain = {
        "schema": SCHEMA,
        "verdict": diagnosis.verdict,
        "exit_status": diagnosis.status,
        "module": diagnosis.launch.module,
        "origin": diagnosis.launch.origin or None,
        "arguments": list(diagnosis.launch.arguments),
        "path": None if diagnosis.path is None else asdict(diagnosis.path),
        "fingerprint": diagnosis.fingerprint,
        "headline": diagnosis.headline or None,
        "error": diagnosis.error or None,
        "corrections": [
            {
                "name": row.name,
                "meaning": row.meaning,
                "verdict": row.verdict,
                "problems": [_problem_to_json(problem) for problem in row.problems],
            }
            for row in diagnosis.rows
        ],
        "notes": [_problem_to_json(problem) for problem in diagnosis.notes],
        "said": list(diagnosis.said),
    }
    # Arguments may contain secrets, and this output is often written to logs.
    return cast(dict[str, Any], redact(plain))


def _problem_to_json(problem: Problem) -> dict[str, Any]:
    from ..correction.problem import format_value  # imported late: it imports torch

    value = problem.value
    return {
        "key": problem.key,
        "value": value if isinstance(value, bool | int | float | str | None) else format_value(value),
        "verdict": problem.verdict,
        "reason": problem.cause,
        "fix": problem.advice,
        "overrides": list(problem.overrides),
    }


_PIPED_COLUMNS = 100
"""Width of a table that is written to a pipe."""


def show_lost(launch: Launch, file: IO[str]) -> None:
    """Print which arguments a script does not pass on, before checking the launch."""
    if launch.lost:
        _print_line(_open_console(file), "ERROR", *launch.explain_lost(), style="ERROR")
        file.flush()


def _open_console(file: IO[str]) -> Console:
    console = Console(file=file, highlight=False)
    return console if console.is_terminal else Console(file=file, highlight=False, width=10_000)


def show(diagnosis: Diagnosis, file: IO[str]) -> None:
    """Print a table of verdicts, then each reason and its fix on separate unbroken lines.

    Lines that ``show_lost`` has printed are omitted.
    """
    console = _open_console(file)
    _print_line(console, _format_launch(diagnosis))
    if diagnosis.headline:
        _print_line(console, diagnosis.headline)
    for line in diagnosis.said:
        _print_line(console, line)
    if diagnosis.error:
        _print_line(console, "ERROR", "no configuration, so nothing would be launched:", style="ERROR")
        _print_line(console, diagnosis.error)
        return
    if diagnosis.rows:
        console.print(_build_table(diagnosis.rows), width=None if console.is_terminal else _PIPED_COLUMNS)
    problems = [problem for problem in diagnosis.problems if problem.parts != ("launch",)]
    problems += diagnosis.notes
    for problem, following in zip_longest(problems, problems[1:]):
        _print_line(console, problem.verdict, str(problem), style=problem.verdict)
        # Overrides shared by consecutive problems are printed once, after the last of them.
        if problem.overrides and (following is None or following.overrides != problem.overrides):
            _print_line(console, f"      {problem.pasted}")
    _print_line(console, _format_conclusion(diagnosis))


def _format_launch(diagnosis: Diagnosis) -> str:
    """Format program, trainer, mode and worker, and the place from which the launch was read."""
    launch, path = diagnosis.launch, diagnosis.path
    what = ", ".join(str(each) for each in (launch.module, path) if each)
    return ": ".join(filter(None, (launch.origin, what)))


def _build_table(rows: tuple[VerdictRow, ...]) -> Table:
    table = Table()
    for heading in ("correction", "verdict", "configured"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        verdict = Text(row.verdict, style=_STYLES[row.verdict])
        table.add_row(Text(redact_text(row.name)), verdict, Text(redact_text(row.meaning)))
    return table


def _print_line(console: Console, *texts: str, style: str | None = None) -> None:
    first, *rest = map(redact_text, texts)
    text = Text()
    text.append(first, style=_STYLES[style] if style else "")
    for each in rest:
        text.append(f" {each}")
    # If the line were wrapped here, it could not be copied and pasted.
    console.print(text, soft_wrap=True)


def _format_conclusion(diagnosis: Diagnosis) -> str:
    if not diagnosis.rows:
        return "Not checked: no correction is configured."
    if diagnosis.verdict == "OK":
        if diagnosis.fingerprint is not None or diagnosis.launch.ours:
            return (
                "OK: every check passes and all hook points exist. The first update proves the correction, or the run "
                "stops."
            )
        if all(row.name.startswith("shadow.") for row in diagnosis.rows):
            return "OK: the shadow corrections will be reported; the run trains with verl's own loss, uncorrected."
        return "OK: verl reads every configured key. Only corrections of this package are proved at the first update."
    fixes = list(dict.fromkeys(each for problem in diagnosis.problems for each in problem.overrides))
    said = f"{diagnosis.verdict}: exit status {diagnosis.status}."
    if len(diagnosis.problems) < 2 or not fixes:
        return said
    # The fixes of all other problems are described only in words.
    what = "All fixes" if all(problem.overrides for problem in diagnosis.problems) else "Fixes that can be pasted"
    return f"{said} {what} in one line: {shlex.join(fixes)}"
