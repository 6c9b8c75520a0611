"""Every start-up check of a launch, as one set: for the launch, ``--check``, the doctor and the fork's smoke test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_patches.contract import PatchError

from ..correction import CorrectionSpec, Problem, SpecError
from ..correction.problem import CheckError, format_value
from ..extensions.registry import load_extensions
from . import fallbacks
from .bound_pairs import find_pairs
from .checks import (
    CHECKS,
    REMARKS,
    Check,
    active,
    null_sections,
    parts_of,
    refused_by_verl,
    shadows_of,
    spec_of,
    unreadable_values,
    unresolved_interpolations,
    with_usual_values,
)
from .hydra_groups import added_overrides, options_of_group, without_overrides
from .resolve import Say, refuse_emptied, resolve
from .shadows import check_beside
from .similar_keys import find_stray_options

_UNREADABLE = (OmegaConfBaseException, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a check raises on a value that it cannot read."""


@dataclass(frozen=True)
class Preflight:
    """What the start-up checks say of a configuration.

    Attributes:
        spec: the correction to train with; None where it could not be read.
        options: of the group ``correction``.
        problems: WRONG ones stop the launch; INERT ones train and do nothing; the others are notes.
        said: lines on what was chosen, such as by ``correction=auto``.
        headline: which correction is on, or UNCORRECTED.
    """

    spec: CorrectionSpec | None
    options: tuple[str, ...]
    problems: tuple[Problem, ...]
    said: tuple[str, ...]
    headline: str

    @property
    def stopping(self) -> tuple[Problem, ...]:
        """Problems that stop the launch."""
        return tuple(problem for problem in self.problems if problem.verdict == "WRONG")

    @property
    def remarks(self) -> tuple[Problem, ...]:
        """Problems that are told and stop nothing."""
        return tuple(problem for problem in self.problems if problem.verdict != "WRONG")


def examine(
    config: DictConfig, overrides: Iterable[str], *, checks: Sequence[Check] = CHECKS, say: Say = lambda line: None
) -> Preflight:
    """Resolve what the launch resolves, in place, and run every check, inside the application that composed it.

    Args:
        config: composed by a primary configuration with our sections.
        overrides: of the command line.
        checks: those that stop a launch; the doctor holds seams in verl's source in the place of importing it.
        say: takes the headline and what was chosen, as soon as they are known.
    """
    overrides = list(overrides)
    if null := list(null_sections(config)):
        return Preflight(None, (), tuple(null), (), headline(None, (), config))
    problems = [*unresolved_interpolations(config), *unreadable_values(config)]
    if any(problem.verdict == "WRONG" for problem in problems):
        # The other checks look at a copy in which these keys have values that can be read.
        config = with_usual_values(config, [problem.key for problem in problems])
    problems += (pairs := list(find_pairs(overrides)))
    problems += _stray_options(overrides)
    said: list[str] = []
    options, spec = [], None
    try:
        options = resolve(config, said.append)
        spec = spec_of(config)
    except SpecError as error:
        # Bounds cross where one of them is a pair that was read as a number, which is told.
        if _owner(error.problem) not in map(_owner, pairs):
            problems.append(error.problem)
    except CheckError as error:
        problems += error.problems
    except _UNREADABLE as error:
        problems.append(_unread("resolve", error))
    first = headline(spec, options, config)
    for line in (first, *said):
        say(line)
    if spec is not None:
        told = {problem.key for problem in pairs}
        problems += [each for each in _around(config, spec, options, checks) if each.key not in told]
    return Preflight(spec, tuple(options), tuple(dict.fromkeys(problems)), tuple(said), first)


def _owner(problem: Problem) -> str:
    """The section that holds a problem's key."""
    return problem.key.rpartition(".")[0]


def headline(spec: CorrectionSpec | None, options: Sequence[str], config: DictConfig) -> str:
    """The line that says which correction is on, or UNCORRECTED."""
    if spec is None:
        return "correction: not readable, so that nothing would be trained"
    asked = [f"{part.name} ({part.meaning})" for part in parts_of(config, spec) if part.ours]
    chosen = f"correction={options[0] if len(options) == 1 else format_value(list(options))}"
    beside = "".join(f"; {each.section} ({each.meaning})" for each in load_extensions(config))
    if asked:
        return f"{chosen}: {', '.join(asked)}{beside}"
    return f"UNCORRECTED: {chosen}, {verls_loss(config)}{beside}"


def verls_loss(config: DictConfig) -> str:
    """What verl itself does to the loss."""
    asked = active(config)
    return f"verl's own algorithm.rollout_correction: {', '.join(asked)}" if asked else "verl's own loss"


def _around(
    config: DictConfig, spec: CorrectionSpec, options: Sequence[str], checks: Sequence[Check]
) -> Iterator[Problem]:
    """Problems around a correction that is well formed."""
    found = list(_stopping(config, spec, checks))
    found += _raised(lambda: check_beside(spec, shadows_of(config)))
    found += _raised(lambda: fallbacks.check(config, spec, lambda changed: run_checks(changed, checks)))
    found += _raised(lambda: refuse_emptied(spec, options))
    if not found:
        found += found_by((refused_by_verl,), config, spec)
    yield from found
    yield from found_by(REMARKS, config, spec)


def _stopping(config: DictConfig, spec: CorrectionSpec, checks: Sequence[Check]) -> Iterator[Problem]:
    """Problems that stop the launch, whatever would become of the correction if it did not."""
    for problem in found_by(checks, config, spec):
        yield problem if problem.verdict == "NOTE" else replace(problem, verdict="WRONG")


def run_checks(config: DictConfig, checks: Sequence[Check] = CHECKS) -> CorrectionSpec:
    """Hold a resolved configuration to the checks.

    Returns:
        The correction to train with.

    Raises:
        SpecError: the correction itself is malformed.
        CheckError: of what stops a launch, all at once.
    """
    spec = spec_of(config)
    if stopping := [each for each in _stopping(config, spec, checks) if each.verdict == "WRONG"]:
        raise CheckError(stopping)
    return spec


def found_by(checks: Iterable[Check], config: DictConfig, spec: CorrectionSpec) -> list[Problem]:
    """The problems that these checks find, in their order; a value that one cannot read hides nothing of the others."""
    problems: list[Problem] = []
    for check in checks:
        try:
            problems += check(config, spec)
        except (PatchError, *_UNREADABLE) as error:
            problems.append(_unread(check.__name__, error))
    return problems


def _raised(step: Callable[[], object]) -> list[Problem]:
    try:
        step()
    except SpecError as error:
        return [error.problem]
    except CheckError as error:
        return list(error.problems)
    return []


def _unread(check: str, error: Exception) -> Problem:
    said = str(error).strip().split("\n")[0] or type(error).__name__
    return Problem("", None, f"The check {check} cannot read the configuration: {said}.")


def _stray_options(overrides: Sequence[str]) -> Iterator[Problem]:
    added = added_overrides(overrides)
    if not added:
        return
    base = None

    def exists(key: str) -> bool:
        nonlocal base
        base = without_overrides(added) if base is None else base
        return OmegaConf.select(base, key, default=...) is not ...

    yield from find_stray_options(added, options_of_group(), exists)
