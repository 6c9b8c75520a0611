"""Each place that refuses a configuration proposes an override, or it is said here why none can be proposed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "recipe" / "offpolicy"
UNMENDED = {
    "analysis/calibration/": (10, "arguments of a tool, no launch"),
    "analysis/whatif/": (17, "arguments of a tool, no launch"),
    "calibrate.py": (1, "arguments of a tool, no launch"),
    "correction/dialects/": (25, "arguments of a function or a tool; the start-up check of verl's keys proposes"),
    "correction/spec.py": (1, "the group comes back only by removing the override"),
    "correction/validation.py": (2, "which tokens are decided together is for the user to say"),
    "doctor/": (3, "a program, a release, or an argument that no override can take back"),
    "extensions/length_penalty/": (1, "a note"),
    "extensions/opd/": (7, "what a teacher serves, and where, is for the user to say"),
    "extensions/pass_at_k/": (1, "a note"),
    "extensions/process_reward/": (1, "a note"),
    "extensions/setting_checks.py": (1, "a section that is no mapping"),
    "monitor/alarms/alarm_settings.py": (1, "a program that was not prepared"),
    "monitor/bounds/bound_settings.py": (2, "a section that is null; the arguments of a helper are its overrides"),
    "preflight/auto_setup.py": (1, "what a cluster looks like is for the user to say"),
    "preflight/checks/agent_loops.py": (6, "notes, and a file of the user's, which no override can change"),
    "preflight/checks/bounds.py": (1, "one override a bound of the band, which has one or two"),
    "preflight/checks/config_reader.py": (1, "of a program that was not prepared as main_offpolicy prepares it"),
    "preflight/checks/policy_loss.py": (1, "a message of verl's that names no key, where no key at its default helps"),
    "preflight/checks/null_sections.py": (1, "a section that is null comes back only by removing the override"),
    "preflight/checks/offpolicy_keys.py": (1, "a section that is null comes back only by removing the override"),
    "preflight/checks/workers_env.py": (1, "what a job was submitted with is no key"),
    "preflight/checks/staleness.py": (1, "a note"),
    "preflight/checks/seams.py": (1, "an installed verl that does not hold is no key"),
    "preflight/checks/unreadable_values.py": (1, "what an interpolation was to give is for the user to say"),
    "preflight/checks/verl_rollout_correction.py": (1, "a note"),
    "preflight/checks/verl_validate_config.py": (1, "a message of verl's that names no key"),
    "preflight/checks/warnings.py": (3, "notes"),
    "preflight/examination.py": (1, "what no check can read"),
    "preflight/fallbacks.py": (4, "which correction is safer is for the user to say"),
    "preflight/hydra_groups.py": (6, "which of two options, or of those that there are, is for the user to say"),
    "preflight/primary_config.py": (1, "a flag is no override"),
    "preflight/resolve.py": (1, "which correction was meant is for the user to say"),
    "preflight/similar_keys.py": (2, "an argument is written anew, and no override can take it back"),
    "translate/rollout_correction.py": (1, "arguments of a function"),
}
"""Files, or folders, with places that propose nothing, or not always -> how many, and why."""


class Refusal(NamedTuple):
    """A place; ``mended``: whether it gives overrides."""

    file: str
    line: int
    mended: bool


@pytest.fixture(scope="module")
def refusals() -> list[Refusal]:
    """Every SpecError and Problem that the package makes."""
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    making = {file: text for file, text in sources.items() if "SpecError(" in text or "Problem(" in text}
    return [each for file, text in making.items() for each in refusals_of(ast.parse(text), file)]


def refusals_of(tree: ast.Module, file: str) -> Iterator[Refusal]:
    bound = _bound(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        if node.func.id == "SpecError" and node.args:
            mended = bool(named.keys() & {"mend", "removed"} or any(keyword.arg is None for keyword in node.keywords))
        elif node.func.id == "Problem":
            given = node.args[6] if len(node.args) == 7 else named.get("overrides")
            mended = given is not None and not _may_be_empty(given, bound)
        else:
            continue
        yield Refusal(file, node.lineno, mended)


def _bound(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """What is assigned to each name of a file."""
    bound: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if _annotated(node) else []
        for target in targets:
            if isinstance(target, ast.Name):
                bound.setdefault(target.id, []).append(node.value)
    return bound


def _annotated(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is not None


def _may_be_empty(overrides: ast.expr, bound: dict[str, list[ast.expr]]) -> bool:
    """Whether a tuple of overrides is written so that it can have none: (), a branch of it, or a filtered one."""
    match overrides:
        case ast.Tuple(elts=elements):
            return not elements
        case ast.IfExp(body=body, orelse=orelse):
            return _may_be_empty(body, bound) or _may_be_empty(orelse, bound)
        case ast.Call(func=ast.Name(id="tuple")) | ast.GeneratorExp():
            return True
        case ast.Name(id=name):
            return any(_may_be_empty(each, {}) for each in bound.get(name, ()))
    return False


def unmended(file: str) -> str | None:
    return next((place for place in UNMENDED if file == place or (place[-1] == "/" and file.startswith(place))), None)


def test_each_refusal_proposes_an_override(refusals: list[Refusal]) -> None:
    missing = [f"{file}:{line}" for file, line, mended in refusals if not mended and unmended(file) is None]
    assert missing == []
    assert sum(mended for _, _, mended in refusals) > 80


@pytest.mark.parametrize(
    ("overrides", "mended"),
    [
        ("(one,)", True),
        ("set_of(one)", True),
        ("(one,) if two else (three,)", True),
        ("()", False),
        ("(one,) if two else ()", False),
        ("tuple(one for one in two)", False),
        ("chosen", False),
        ("given", True),
    ],
)
def test_overrides_that_may_be_none_are_not_enough(overrides: str, mended: bool) -> None:
    source = f"chosen = (one,) if two else ()\ngiven = (one,)\nProblem(a, b, c, d, overrides={overrides})"
    (found,) = refusals_of(ast.parse(source), "a.py")
    assert found.mended is mended


@pytest.mark.parametrize("place", UNMENDED)
def test_no_exception_covers_more_than_it_says(place: str, refusals: list[Refusal]) -> None:
    found = [f"{file}:{line}" for file, line, mended in refusals if not mended and unmended(file) == place]
    assert len(found) == UNMENDED[place][0], found
