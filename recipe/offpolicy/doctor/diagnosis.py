"""The verdict on each correction of one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from verl_patches.contract import PatchError

from ..alarms import fallback
from ..checks import (
    CHECKS,
    OF_VERLS_OWN,
    REMARKS,
    Check,
    CheckError,
    Part,
    null_sections,
    parts_of,
    path,
    refused_by_verl,
    shadows_of,
    spec_of,
)
from ..correction import CorrectionSpec, SpecError
from ..findings import EVERYTHING, MU, Problem, told
from ..live_path import LivePath, live_path
from ..preparation import refuse_emptied, resolve
from ..shadow import check_beside
from ..verl_keys.router_replay import ROUTER_REPLAY
from . import seams
from .launch import VERLS, Launch, LaunchError, composed
from .raw import numbers_of_pairs

State = Literal["LIVE", "INERT", "WRONG"]
_STATUS: dict[State, int] = {"LIVE": 0, "INERT": 1, "WRONG": 2}
_OF_VERL = ("0.7.1", "0.8.0", "0.9.1")


@dataclass(frozen=True)
class Row:
    """One thing that the configuration asks for.

    Attributes:
        name: such as ``weight``, ``masks.gsm`` or ``rollout_correction.rollout_is``.
        meaning: what is asked for; "" where it is named by a problem alone.
        problems: with a verdict, the worst first.
    """

    name: str
    meaning: str
    problems: tuple[Problem, ...] = ()

    @property
    def verdict(self) -> State:
        verdicts = {problem.verdict for problem in self.problems}
        return "WRONG" if "WRONG" in verdicts else "INERT" if "INERT" in verdicts else "LIVE"


@dataclass(frozen=True)
class Diagnosis:
    """What is to be said of a launch.

    Attributes:
        path: release, trainer and worker; None where the configuration does not compose.
        notes: remarks that change no verdict.
        said: what the launch itself would say, such as what ``correction=auto`` chose.
        fingerprint: of our own correction.
        error: why there is no configuration to look at; "" where there is.
    """

    launch: Launch
    path: LivePath | None = None
    rows: tuple[Row, ...] = ()
    notes: tuple[Problem, ...] = ()
    said: tuple[str, ...] = ()
    fingerprint: int | None = None
    error: str = ""

    @property
    def verdict(self) -> State:
        if self.error:
            return "WRONG"
        return max((row.verdict for row in self.rows), key=_STATUS.__getitem__, default="LIVE")

    @property
    def status(self) -> int:
        """0: all is live, or nothing is asked for; 1: something would do nothing; 2: something else than it says."""
        return _STATUS[self.verdict]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Each once."""
        return tuple(dict.fromkeys(problem for row in self.rows for problem in map(_hashable, row.problems)))


def diagnose(launch: Launch) -> Diagnosis:
    """Compose the launch's configuration and run every check and remark on it, without Ray."""
    said: list[str] = []
    try:
        config = composed(launch)
        if null := list(null_sections(config)):
            return Diagnosis(launch, rows=arranged((), null)[0])
        where = live_path(config)
    except (LaunchError, PatchError, SpecError) as error:
        return Diagnosis(launch, error=str(error))
    except OmegaConfBaseException as error:
        return Diagnosis(launch, error=f"{launch.module}: not a configuration of verl's PPO ({error}).")
    try:
        options = resolve(config, said.append) if launch.ours else []
        return replace(judged(config, launch, options, (refused_by_verl,)), said=tuple(said))
    except SpecError as error:
        return Diagnosis(launch, where, rows=_malformed(told(error), launch), said=tuple(said))


def judged(config: DictConfig, launch: Launch, options: Sequence[str] = (), last: Sequence[Check] = ()) -> Diagnosis:
    """The verdicts on a configuration that is composed, and prepared as the launch prepares it.

    Args:
        options: of the group ``correction``.
        last: checks that the launch makes of what all others let pass.

    Raises:
        SpecError: the correction itself is malformed.
    """
    where = live_path(config)
    spec = spec_of(config) if launch.ours else CorrectionSpec()
    raw = list(numbers_of_pairs(launch.overrides))
    problems = _of_ours(config, spec, options) if launch.ours else _of_verl(config, launch, where)
    read_otherwise = {problem.key for problem in raw}
    problems = [*raw, *(problem for problem in problems if problem.key not in read_otherwise)]
    if all(problem.verdict != "WRONG" for problem in problems):
        problems += _found(last, config, spec)
    rows, notes = arranged(parts_of(config, spec), problems)
    return Diagnosis(launch, where, rows, notes, fingerprint=None if spec.is_none else spec.fingerprint())


def arranged(parts: Iterable[Part], problems: Iterable[Problem]) -> tuple[tuple[Row, ...], tuple[Problem, ...]]:
    """A row for each part with what concerns it, and rows for problems of what is no part; and the notes."""
    parts = list(parts)
    rows = {part.name: Row(part.name, part.meaning) for part in parts}
    notes = []
    for problem in problems:
        if problem.verdict == "NOTE":
            notes.append(problem)
            continue
        concerned = [part.name for part in parts if _concerns(problem, part)]
        if not concerned:
            named = next(iter(problem.parts), "")
            own = problem.key or "correction"
            concerned = [own if named in ("", *EVERYTHING, *MU) else named]
        for name in concerned:
            row = rows.get(name, Row(name, ""))
            rows[name] = replace(row, problems=(*row.problems, problem))
    by_weight = {"WRONG": 0, "INERT": 1, "NOTE": 2}
    return tuple(
        replace(row, problems=tuple(sorted(row.problems, key=lambda each: by_weight[each.verdict])))
        for row in rows.values()
    ), tuple(notes)


def _malformed(problem: Problem, launch: Launch) -> tuple[Row, ...]:
    """Rows for a correction that is malformed, and for bounds that Hydra read otherwise, which may be the cause."""
    raw = list(numbers_of_pairs(launch.overrides))
    rows, _ = arranged((), raw)
    sections = {each.key.rpartition(".")[0] for each in raw}
    explained = problem.key.rpartition(".")[0] in sections
    return rows if explained else (*rows, Row("correction", "", (problem,)))


def _concerns(problem: Problem, part: Part) -> bool:
    if problem.parts == EVERYTHING:
        return part.name != ROUTER_REPLAY
    return (problem.parts == MU and part.reads_mu) or part.name in problem.parts


def _of_ours(config: DictConfig, spec: CorrectionSpec, options: Sequence[str]) -> list[Problem]:
    """As the launch checks it; seams are read in verl's source."""
    checks = tuple(_seams if check is path.seams else check for check in CHECKS)
    problems = _found((*checks, *REMARKS), config, spec)

    def run_checks(changed: DictConfig) -> None:
        if found := _found(checks, changed, spec_of(changed)):
            raise CheckError(found)

    steps: tuple[Callable[[], Any], ...] = (
        lambda: check_beside(spec, shadows_of(config)),
        lambda: fallback.check(config, spec, run_checks),
        lambda: refuse_emptied(spec, options),
    )
    for step in steps:
        try:
            step()
        except SpecError as error:
            problems.append(told(error))
        except CheckError as error:
            problems += [each for each in error.problems if each not in problems]
    return problems


def _of_verl(config: DictConfig, launch: Launch, where: LivePath) -> list[Problem]:
    """verl's own programs: its own correction alone."""
    problems = []
    if launch.module not in VERLS:
        reason = "a trainer of its own: which keys it reads was not looked at."
        fix = f"Launch {VERLS[0]}, or recipe.offpolicy.main_offpolicy with a correction."
        problems.append(Problem("module", launch.module, reason, fix))
    if where.release not in _OF_VERL:
        reason = f"which keys this release reads was not looked at; of {', '.join(_OF_VERL)} it was."
        problems.append(Problem("verl", where.release, reason, "Install one of them."))
    return [*problems, *_found((*OF_VERLS_OWN, *REMARKS), config, CorrectionSpec())]


def _seams(config: DictConfig, spec: CorrectionSpec) -> Iterable[Problem]:
    return path.seams_held(live_path(config), seams.hold)


def _found(checks: Iterable[Check | Any], config: DictConfig, spec: CorrectionSpec) -> list[Problem]:
    """As ``checks.found_by``; a value that a check cannot read hides nothing of the others."""
    problems: list[Problem] = []
    for check in checks:
        try:
            problems += check(config, spec)
        except (OmegaConfBaseException, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            said = str(error).strip().split("\n")[0]
            reason = f"The check {check.__name__} cannot read the configuration: {said}."
            problems.append(Problem("", None, reason, ""))
    return problems


def _hashable(problem: Problem) -> Problem:
    """Values of a configuration may be mappings."""
    return replace(problem, value=str(problem.value)) if isinstance(problem.value, dict | list) else problem
